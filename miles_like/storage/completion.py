"""Completion markers: a stage's output is complete exactly when its marker exists and matches.

The marker is written last (temporary file, fsync, rename). It holds the hash of the stage's typed inputs and, for every
output file, size, modification time and SHA-256. A file with the same size and time is trusted; a file with another
time is hashed again; any other difference makes the output invalid, and the stage runs again.

Paths in a marker are relative to it where the data lies beside it, so a cache can be moved or copied as a whole.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypedDict, cast

from miles_like.limits.regular_files import open_regular

MARKER = ".complete.json"
ABSENT = "no cached copy"  # why_incomplete's reason for an output of which nothing exists
FORMAT = 1  # of the inputs that a stage's key hashes
VERSION = 2  # of a marker; in version 1 its root is absolute
_STAGE_DIRECTORY = re.compile(r"[a-z]+-[0-9a-f]{16}")  # of a cache


class OutputFile(TypedDict):
    """An output file in a marker."""

    size: int
    mtime_ns: int
    sha256: str


class Marker(TypedDict):
    """A marker's content. Only `root` and `files` are sure to be there when it was read from disk."""

    version: int
    stage: str
    key: str
    root: str
    files: dict[str, OutputFile]


@dataclass(frozen=True, slots=True)
class Output:
    """The output of a complete stage: files under `root`, with size and SHA-256 as in its marker."""

    root: Path
    files: Mapping[str, OutputFile]


def input_key(stage: str, inputs: Mapping[str, Any]) -> str:
    """16 hex digits that name a stage's output: the hash of the stage's name and its inputs, which are JSON values."""
    text = json.dumps({"stage": stage, "format": FORMAT, "inputs": inputs}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a regular file. Raises ValueError for a file of another kind, OSError as `os.open` does."""
    with os.fdopen(open_regular(path), "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def file_fact(path: Path, known: tuple[int, str] | None = None) -> OutputFile:
    """A file's entry in a marker. `known`: (size, SHA-256) by the file's writer, used if the size still matches."""
    st = path.stat()
    sha256 = known[1] if known is not None and known[0] == st.st_size else file_sha256(path)
    return {"size": st.st_size, "mtime_ns": st.st_mtime_ns, "sha256": sha256}


@functools.lru_cache(maxsize=1 << 16)
def _sha256_once(path: Path, size: int, mtime_ns: int) -> str:
    """Cached: a copied cache is checked several times before its new times are stored, and each file is read once."""
    return file_sha256(path)


def files_under(root: Path) -> list[Path]:
    """Files of an output without markers, lock files and partial files, in name order."""
    return sorted(
        p for p in root.rglob("*") if p.is_file() and p.name != MARKER and not p.name.endswith((".partial", ".lock"))
    )


def cleared(directory: Path) -> Path:
    """Empty `directory` for a stage that starts over, and return its data folder, which is not created."""
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
    """Mark `files` under `root` as the complete output of `stage` for inputs `key`.

    known: relative name -> (size, SHA-256) of files that their writer has hashed; they are not read again.
    """
    names = {str(p.relative_to(root)): p for p in files}
    facts = {name: file_fact(p, (known or {}).get(name)) for name, p in names.items()}
    marker_dir.mkdir(parents=True, exist_ok=True)
    stored_root = _stored_root(marker_dir, root)
    marker = Marker(version=VERSION, stage=stage, key=key, root=stored_root, files=facts)
    write_atomically(marker_dir / MARKER, json.dumps(marker, indent=1))


def write_atomically(path: Path, text: str) -> None:
    """Write so that readers see the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def _stored_root(marker_dir: Path, root: Path) -> str:
    """`root` as a marker stores it: a relative path where it lies in the marker's directory or beside it."""
    base, root = marker_dir.resolve(), root.resolve()
    return os.path.relpath(root, base) if root.is_relative_to(base.parent) else str(root)


def marker_root(marker_dir: Path, marker: Marker) -> Path:
    """The absolute path of a marker's files.

    A marker of version 1 holds the absolute path that the cache had when the marker was written. It is mapped to the
    same place in the cache that holds the marker now, if there is one; the root of a run's marker is its directory.
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


def read_marker(marker_dir: Path) -> Marker | None:
    """The marker; None when it is missing or cannot be read."""
    try:
        marker = json.loads((marker_dir / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return cast("Marker", marker) if _is_marker(marker) else None


def _is_marker(found: object) -> bool:
    """Whether `found` has every key that is read of a marker, and names no file outside its root."""
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
    """None when the output is complete and made from these inputs, else the reason in a few words."""
    marker = read_marker(marker_dir)
    if marker is None:
        if (marker_dir / MARKER).exists():
            return f"its marker {MARKER} is damaged"
        return "incomplete" if marker_dir.exists() and any(marker_dir.iterdir()) else ABSENT
    if marker.get("key") != key:
        return "configuration changed"
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
    """Store the files' present modification times, after `why_incomplete` returned None: a copied cache is then hashed
    only once."""
    marker = read_marker(marker_dir)
    if marker is None:
        return
    root = marker_root(marker_dir, marker)
    times = {name: (root / name).stat().st_mtime_ns for name in marker["files"]}
    if any(fact["mtime_ns"] != times[name] for name, fact in marker["files"].items()):
        for name, fact in marker["files"].items():
            fact["mtime_ns"] = times[name]
        write_atomically(marker_dir / MARKER, json.dumps(marker, indent=1))
