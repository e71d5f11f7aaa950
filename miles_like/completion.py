"""Completion markers: a stage's output is whole exactly when its marker is there and fits.

The marker is written last (temporary file, fsync, rename), holds the hash of the stage's typed inputs and, for every
output file, size, modification time and SHA-256. A file whose size and time still fit is trusted; one whose time moved
is hashed again; anything else makes the output invalid, and the stage is done over.

Paths in a marker are relative to it wherever the data lies beside it, so a cache can be moved or copied as a whole.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from miles_like.regular_files import open_regular

MARKER = ".complete.json"
FORMAT = 1  # of what a stage's key is made of
VERSION = 2  # of a marker; 1: its root is absolute
_STAGE_DIRECTORY = re.compile(r"[a-z]+-[0-9a-f]{16}")  # of a cache


def input_key(stage: str, inputs: Mapping[str, Any]) -> str:
    """16 hex digits that name a stage's output: the hash of its name and JSON-able inputs."""
    text = json.dumps({"stage": stage, "format": FORMAT, "inputs": inputs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Hex digits of a regular file's bytes. Raises ValueError for a file of another kind, OSError as `os.open`."""
    with os.fdopen(open_regular(path), "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@functools.lru_cache(maxsize=1 << 16)
def _sha256_once(path: Path, size: int, mtime_ns: int) -> str:
    """A copied cache is asked several times before its new times are stored: each file is read once a process."""
    return file_sha256(path)


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
    marker_dir.mkdir(parents=True, exist_ok=True)
    marker = {"version": VERSION, "stage": stage, "key": key, "root": _stored_root(marker_dir, root), "files": facts}
    write_atomically(marker_dir / MARKER, json.dumps(marker, indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Readers see the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def _stored_root(marker_dir: Path, root: Path) -> str:
    """`root` as a marker holds it: relative to the marker where it lies in the same directory or beside it."""
    own, root = marker_dir.resolve(), root.resolve()
    return os.path.relpath(root, own) if root.is_relative_to(own.parent) else str(root)


def marker_root(marker_dir: Path, marker: Mapping[str, Any]) -> Path:
    """Where the files of a marker are, absolute.

    A marker of version 1 holds the absolute path where the cache was when it was written. It is read as the same place
    in the cache that holds the marker now, if there is one; a run's own marker is of its directory.
    """
    root = Path(marker["root"])
    if not root.is_absolute():
        return (marker_dir / root).resolve()
    if marker.get("version") == VERSION:
        return root
    if marker.get("stage") == "train":
        return marker_dir.resolve()
    here = marker_dir.parent / root.parent.name / root.name
    is_cached = root.name == "data" and _STAGE_DIRECTORY.fullmatch(root.parent.name)
    return here.resolve() if is_cached and here.is_dir() else root


def read_marker(marker_dir: Path) -> dict[str, Any] | None:
    """The marker, or None when there is none or it cannot be read."""
    try:
        marker = json.loads((marker_dir / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return marker if _is_marker(marker) else None


def _is_marker(found: object) -> bool:
    """Whether it has all that is read of a marker, and names no file outside its root."""
    if not (isinstance(found, dict) and isinstance(found.get("root"), str) and isinstance(found.get("files"), dict)):
        return False
    for name, fact in found["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\0" in name or not isinstance(fact, dict):
            return False
        if type(fact.get("size")) is not int or type(fact.get("mtime_ns")) is not int:
            return False
        if not isinstance(fact.get("sha256"), str):
            return False
    return "\0" not in found["root"]


def why_incomplete(marker_dir: Path, key: str) -> str | None:
    """None when the output is whole and made from these inputs, else the reason in a few words."""
    marker = read_marker(marker_dir)
    if marker is None:
        if (marker_dir / MARKER).exists():
            return f"its marker {MARKER} is damaged"
        return "half-written" if marker_dir.exists() and any(marker_dir.iterdir()) else "not there"
    if marker.get("key") != key:
        return "made from other inputs"
    root = marker_root(marker_dir, marker)
    for name, fact in marker["files"].items():
        try:
            st = (root / name).stat()
        except OSError:
            return f"{root / name} is missing"
        if st.st_size != fact["size"]:
            return f"{root / name} has {st.st_size} bytes, not {fact['size']}"
        if (
            st.st_mtime_ns != fact["mtime_ns"]
            and _sha256_once(root / name, st.st_size, st.st_mtime_ns) != fact["sha256"]
        ):
            return f"{root / name} was changed"
    return None


def note_times(marker_dir: Path) -> None:
    """Store the files' modification times, once `why_incomplete` found the output whole: a copy is hashed only once."""
    marker = read_marker(marker_dir)
    if marker is None:
        return
    root = marker_root(marker_dir, marker)
    times = {name: (root / name).stat().st_mtime_ns for name in marker["files"]}
    if any(fact["mtime_ns"] != times[name] for name, fact in marker["files"].items()):
        facts = {name: fact | {"mtime_ns": times[name]} for name, fact in marker["files"].items()}
        write_atomically(marker_dir / MARKER, json.dumps(marker | {"files": facts}, indent=1))
