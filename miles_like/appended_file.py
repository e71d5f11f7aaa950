"""Files of a run that only grow, a line after another, and are cut back where a run resumes.

A checkpoint holds how long each of them was and the SHA-256 of that much, which the writer keeps up to date as it goes:
who resumes cuts off what came later, so that the resumed run writes the file of a run that was never stopped.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from miles_like.checkpoint_files import DamagedError
from miles_like.types import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A file up to some place."""

    bytes: int
    sha256: str  # of these bytes


class AppendedFile:
    """Goes on after what is there. Each `write` reaches the file whole, in one call."""

    def __init__(self, path: Path) -> None:
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
        data = text.encode()
        self._file.write(data)
        self._file.flush()
        self._hash.update(data)
        self._bytes += len(data)

    def sync(self) -> None:
        """What was written is on disk when this returns."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def cut_back(path: Path, to: Position) -> None:
    """What came after that position is gone, also from the disk. Raises as `check_beginning`."""
    check_beginning(path, to)
    if path.exists():
        with path.open("r+b") as f:
            f.truncate(to.bytes)
            os.fsync(f.fileno())


def check_beginning(path: Path, to: Position) -> None:
    """Raises DamagedError where the file is shorter than that position, or has other bytes before it."""
    _check_own(path)
    if not to.bytes and not path.exists():
        return
    remedy = "resume from a checkpoint before it was changed, or use --fresh"
    if not path.is_file() or (size := path.stat().st_size) < to.bytes:
        has = f"has {size} bytes" if path.is_file() else "is missing"
        raise DamagedError(f"{path} {has}, {to.bytes} were written when the checkpoint was saved: {remedy}")
    digest, left = hashlib.sha256(), to.bytes
    with path.open("rb") as f:
        while left:
            block = f.read(min(left, 1 << 20))
            digest.update(block)
            left -= len(block)
    if digest.hexdigest() != to.sha256:
        raise DamagedError(f"{path} has other bytes than when the checkpoint was saved: {remedy}")


def _check_own(path: Path) -> None:
    """Raises DamagedError where writing to `path` would write to another file, or to none."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise DamagedError(f"{path} is a link, a device or a directory, not a file that the run wrote: remove it")


def positions(files: Mapping[str, AppendedFile]) -> Json:
    """{name: {bytes, sha256}} of each file by its name in the run directory. What was written is on disk."""
    for file in files.values():
        file.sync()
    return {name: asdict(file.position) for name, file in files.items()}


def cut_all_back(run_dir: Path, saved: Json) -> None:
    """Each file of `positions` as it was then, or, where one is damaged, all as they are. Raises as `cut_back`."""
    assert isinstance(saved, Mapping)
    if wrong := [name for name in saved if Path(name).name != name]:
        raise DamagedError(f"the checkpoint names {wrong[0]!r}, which is no file of the run directory: nothing is cut")
    found = {run_dir / name: Position(**cast("Mapping[str, Any]", one)) for name, one in saved.items()}
    for path, position in found.items():
        check_beginning(path, position)
    for path, position in found.items():
        cut_back(path, position)
