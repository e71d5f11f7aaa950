"""Completion markers: a stage's output is whole exactly when its marker is there and fits.

The marker is written last (temporary file, fsync, rename), holds the hash of the stage's typed inputs and, for every
output file, size, modification time and SHA-256. A file whose size and time still fit is trusted; one whose time moved
is hashed again; anything else makes the output invalid, and the stage is done over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MARKER = ".complete.json"
FORMAT = 1


def input_key(stage: str, inputs: Mapping[str, Any]) -> str:
    """16 hex digits that name a stage's output: the hash of its name and JSON-able inputs."""
    text = json.dumps({"stage": stage, "format": FORMAT, "inputs": inputs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def files_under(root: Path) -> list[Path]:
    """Files of an output, markers and partial files left out, in name order."""
    return sorted(
        p for p in root.rglob("*") if p.is_file() and p.name != MARKER and not p.name.endswith((".partial", ".lock"))
    )


def cleared(directory: Path) -> Path:
    """Where the data goes of a stage that begins anew: `directory`, emptied, and `data` in it, not made."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory / "data"


def write_marker(
    marker_dir: Path,
    *,
    stage: str,
    key: str,
    root: Path,
    files: Sequence[Path],
    known: Mapping[str, tuple[int, str]] | None = None,
) -> None:
    """Mark `files` under `root` as the whole output of `stage` for inputs `key`.

    known: relative name -> (size, SHA-256) of files whose writer has hashed them; they are not read again.
    """
    facts = {}
    for p in files:
        st, name = p.stat(), str(p.relative_to(root))
        size, digest = (known or {}).get(name, (-1, ""))
        sha256 = digest if size == st.st_size else file_sha256(p)
        facts[name] = {"size": st.st_size, "mtime_ns": st.st_mtime_ns, "sha256": sha256}
    marker = {"stage": stage, "key": key, "root": str(root.resolve()), "files": facts}
    marker_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(marker_dir / MARKER, json.dumps(marker, indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def read_marker(marker_dir: Path) -> dict[str, Any] | None:
    """The marker, or None when there is none or it cannot be read."""
    try:
        marker = json.loads((marker_dir / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return marker if isinstance(marker, dict) else None


def why_incomplete(marker_dir: Path, key: str) -> str | None:
    """None when the output is whole and made from these inputs, else the reason in a few words."""
    marker = read_marker(marker_dir)
    if marker is None:
        return "half-written" if marker_dir.exists() and any(marker_dir.iterdir()) else "not there"
    if marker.get("key") != key:
        return "made from other inputs"
    root = Path(marker["root"])
    for name, fact in marker["files"].items():
        try:
            st = (root / name).stat()
        except OSError:
            return f"{name} is missing"
        if st.st_size != fact["size"]:
            return f"{name} has {st.st_size} bytes, not {fact['size']}"
        if st.st_mtime_ns != fact["mtime_ns"] and file_sha256(root / name) != fact["sha256"]:
            return f"{name} was changed"
    return None
