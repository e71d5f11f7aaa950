"""Determines whether a node sees a directory of the driver, by a file in it that the driver has written or listed."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PROBE = ".probe-"  # begins the name of a file that is written for this; a killed driver may leave one


@dataclass(frozen=True, slots=True)
class Probe:
    """A file of the driver's, by which a node finds out whether it sees that file's directory. Either the file was
    written for this and has `token`, or it is one of the directory and has this inode, size and time on the driver."""

    path: Path
    token: str | None
    identity: tuple[int, int, int] = (0, 0, 0)

    def is_seen(self) -> bool:
        try:
            if self.token is None:
                return _identity(self.path) == self.identity
            return self.path.read_text(encoding="utf-8") == self.token
        except (OSError, UnicodeDecodeError):
            return False


def probe_of(path: Path) -> Probe:
    """A probe of a directory that is only read: one of its files. File systems that give a file another inode on each
    machine are taken for separate disks."""
    return Probe(path, None, _identity(path))


def _identity(path: Path) -> tuple[int, int, int]:
    st = path.stat()
    return st.st_ino, st.st_size, st.st_mtime_ns


@contextmanager
def probe_in(directory: Path) -> Iterator[Probe]:
    """A probe that exists in `directory` while the context lasts. Raises OSError where none can be written."""
    token = f"{socket.gethostname()} {os.getpid()} {secrets.token_hex(16)}"
    path = directory / f"{PROBE}{secrets.token_hex(4)}.lock"
    path.write_text(token, encoding="utf-8")
    try:
        yield Probe(path, token)
    finally:
        path.unlink(missing_ok=True)


def existing(path: Path) -> Path:
    """`path`, or the nearest directory above it that exists. A directory that the driver makes there later is seen by
    the nodes that see this one."""
    path = path.absolute()
    while not path.is_dir() and path != path.parent:
        path = path.parent
    return path
