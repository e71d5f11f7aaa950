"""Append-only files of a run, cut back to a checkpoint's position when the run resumes.

A checkpoint stores the length of each file and the SHA-256 of its bytes so far, which the writer updates with every
write. A resumed run replaces each file by one of that length, so that it writes the same file as a run that was never
stopped; a process of the run before, which still has the old file open, writes into none of the directory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from miles_like.hf.checkpoint import sync_path
from miles_like.protocols import Fencing
from miles_like.storage.checkpoint_files import DamagedError
from miles_like.types import Json

_BLOCK = 1 << 20  # bytes that are read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The first `bytes` bytes of a file."""

    bytes: int
    sha256: str  # of these bytes


class AppendedFile:
    """Appends to an existing or new file. Each `write` is one system call."""

    def __init__(self, path: Path, fence: Fencing | None = None) -> None:
        """fence: checked before each write; None: the directory has no epochs."""
        self._fence = fence
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_own(path)
        self._file = path.open("ab")
        with path.open("rb") as f:
            self._hash = hashlib.file_digest(f, "sha256")
        self._bytes = path.stat().st_size

    @property
    def position(self) -> Position:
        return Position(bytes=self._bytes, sha256=self._hash.hexdigest())

    def write(self, text: str) -> None:
        """Raises as `Fencing.check`, and has written nothing then."""
        if self._fence is not None:
            self._fence.check()
        data = text.encode()
        self._file.write(data)
        self._file.flush()
        self._hash.update(data)
        self._bytes += len(data)

    def sync(self) -> None:
        """fsync what was written."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def truncate_to(path: Path, to: Position) -> None:
    """Replace `path` by a file of its bytes up to a position, on disk. Raises as `check_prefix` does."""
    check_prefix(path, to)
    if path.exists():
        replace_by_copy(path, to.bytes)


def replace_by_copy(path: Path, nbytes: int) -> None:
    """Replace `path` by a copy of its first bytes, on disk. A process that has it open writes into no file of the
    directory from then on."""
    cut = path.with_name(path.name + ".partial")
    with path.open("rb") as old, cut.open("wb") as new:
        left = nbytes
        while left and (block := old.read(min(left, _BLOCK))):
            new.write(block)
            left -= len(block)
        new.flush()
        os.fsync(new.fileno())
    cut.replace(path)
    sync_path(path.parent)


def check_prefix(path: Path, to: Position) -> None:
    """Raises DamagedError where the file is shorter than the position, or has other bytes before it."""
    _check_own(path)
    if not to.bytes and not path.exists():
        return
    remedy = "resume from an earlier checkpoint, or start again with --fresh"
    if not path.is_file() or (size := path.stat().st_size) < to.bytes:
        has = f"has {size} bytes" if path.is_file() else "is missing"
        raise DamagedError(f"{path} {has}, but {to.bytes} bytes were written when the checkpoint was saved: {remedy}")
    digest, left = hashlib.sha256(), to.bytes
    with path.open("rb") as f:
        while left:
            block = f.read(min(left, _BLOCK))
            digest.update(block)
            left -= len(block)
    if digest.hexdigest() != to.sha256:
        raise DamagedError(f"{path} was changed after the checkpoint was saved: {remedy}")


def _check_own(path: Path) -> None:
    """Raises DamagedError where writing to `path` would write to another file, or to none."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise DamagedError(f"{path} is a link, a device or a directory, not a file that the run wrote: remove it")


def positions(files: Mapping[str, AppendedFile]) -> Json:
    """{name: {bytes, sha256}} of each file, keyed by its name in the run directory, after an fsync of each."""
    for file in files.values():
        file.sync()
    return {name: asdict(file.position) for name, file in files.items()}


def _position(saved: Json) -> Position:
    place = cast("Mapping[str, object]", saved)  # as `run_state_schema.FilePosition` has checked it
    return Position(bytes=cast(int, place["bytes"]), sha256=cast(str, place["sha256"]))


def truncate_all(run_dir: Path, saved: Json) -> None:
    """Cut each file back to its position in `saved`, a result of `positions`. Raises DamagedError where one is damaged,
    before any is truncated."""
    assert isinstance(saved, Mapping)
    if wrong := [name for name in saved if Path(name).name != name]:
        raise DamagedError(f"the checkpoint lists {wrong[0]!r}, which is not a file of the run directory")
    found = {run_dir / name: _position(one) for name, one in saved.items()}
    for path, position in found.items():
        check_prefix(path, position)
    for path, position in found.items():
        truncate_to(path, position)
