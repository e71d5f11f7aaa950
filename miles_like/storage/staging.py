"""Copies a stage's files to node-local storage, verified by checksum. Runs on every node, so it is self-contained."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

_BLOCK = 16 << 20


class FileSum(TypedDict):
    """A file's part of a completion marker that is used here."""

    size: int
    sha256: str


class Staged(TypedDict):
    """Result of one node."""

    node: str
    copied_bytes: int
    skipped_bytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Files to copy from `source` to `target`: relative name -> size and checksum."""

    source: Path
    target: Path
    files: Mapping[str, FileSum]


@dataclass(frozen=True, slots=True)
class StageFiles:
    """The copies of one node; picklable."""

    copies: tuple[Copy, ...]

    def __call__(self, alive: Callable[[], None] = lambda: None) -> Staged:
        """Copy the files that are missing or differ. Raises ValueError for a wrong checksum or a full disk.

        alive: called after every block that is read.
        """
        copied = skipped = 0
        for c in self.copies:
            for name, fact in c.files.items():
                if _is_there(c.target / name, fact, alive):
                    skipped += fact["size"]
                else:
                    _copy(c.source / name, c.target / name, fact, alive)
                    copied += fact["size"]
        return {"node": socket.gethostname(), "copied_bytes": copied, "skipped_bytes": skipped}


def _is_there(path: Path, fact: FileSum, alive: Callable[[], None]) -> bool:
    try:
        if path.stat().st_size != fact["size"]:
            return False
        digest = hashlib.sha256()
        with path.open("rb") as f:
            while block := f.read(_BLOCK):
                digest.update(block)
                alive()
        return digest.hexdigest() == fact["sha256"]
    except OSError:
        return False


def _copy(source: Path, target: Path, fact: FileSum, alive: Callable[[], None]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # the name is unique to this process: nodes may share the disk, and each copies what it does not find
    partial = target.with_name(f"{target.name}.{socket.gethostname()}-{os.getpid()}.partial")
    digest = hashlib.sha256()
    try:
        with source.open("rb") as read, partial.open("wb") as write:
            while block := read.read(_BLOCK):
                digest.update(block)
                write.write(block)
                alive()
            write.flush()
            os.fsync(write.fileno())
    except OSError as e:
        partial.unlink(missing_ok=True)
        if e.errno == errno.ENOSPC:
            raise ValueError(
                f"{socket.gethostname()}: no space left for {target} ({fact['size']} bytes): "
                "free some, or point cluster.stage_dir at a larger disk"
            ) from None
        raise ValueError(f"{socket.gethostname()}: {source} -> {target}: {e.strerror}") from None
    if digest.hexdigest() != fact["sha256"]:
        partial.unlink(missing_ok=True)
        raise ValueError(
            f"{socket.gethostname()}: {source} has sha256 {digest.hexdigest()[:12]}.., its marker has "
            f"{fact['sha256'][:12]}..: the source changed or is damaged; run the stage that makes it again"
        )
    os.replace(partial, target)
