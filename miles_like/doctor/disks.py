"""Free size, speed, kind and reach of the file systems below some paths. A measurement is bounded in bytes and time."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TypedDict

from miles_like.nodes.probe import disk_of
from miles_like.nodes.sight import existing

MEASURED_BYTES = 64 << 20  # at most; and a quarter of what is free
MEASURED_S = 2.0  # of writing, and of reading
_PART = 4 << 20
_MARKER = ".miles-like-doctor-"


class DiskFacts(TypedDict):
    """The file system of one path. Speeds in bytes a second; 0: not measured, because it cannot be written."""

    free: int
    kind: str  # "ext4", "tmpfs", "nfs4", ...
    write: float
    read: float
    error: str  # why a file could not be written; "" where one could


def disk_facts(path: str, token: str) -> DiskFacts:
    """Measure, and leave an empty marker file with the token in its name, which `forget` removes."""
    directory = existing(Path(path))
    _, free = disk_of(directory)
    out: DiskFacts = {
        "free": free,
        "kind": kind_of(directory, Path("/proc/self/mountinfo")),
        "write": 0.0,
        "read": 0.0,
        "error": "",
    }
    file = directory / f"{_MARKER}{token}.data"
    try:
        (directory / f"{_MARKER}{token}").touch()
        out["write"], out["read"] = _speeds(file, min(MEASURED_BYTES, free // 4))
    except OSError as e:
        out["error"] = e.strerror or str(e)
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    return out


def seen(path: str, tokens: tuple[str, ...]) -> tuple[str, ...]:
    """The tokens whose markers are visible at `path` from this machine."""
    directory = existing(Path(path))
    with contextlib.suppress(OSError):
        os.listdir(directory)  # makes a network file system look again
    return tuple(token for token in tokens if (directory / f"{_MARKER}{token}").exists())


def forget(path: str, token: str) -> None:
    """Remove this machine's marker."""
    with contextlib.suppress(OSError):
        (existing(Path(path)) / f"{_MARKER}{token}").unlink(missing_ok=True)


def kind_of(directory: Path, mounts: Path) -> str:
    """Type of the file system, by the longest mount point above the directory; "?" where it is not known."""
    best, kind = -1, "?"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].replace("\\040", " "))
        if directory.resolve().is_relative_to(point) and len(point.parts) >= best:  # a later mount hides an earlier
            best, kind = len(point.parts), after.split()[0]
    return kind


def _speeds(file: Path, nbytes: int) -> tuple[float, float]:
    """(bytes a second written and synced, read without the page cache where the system drops it)."""
    part = os.urandom(_PART)
    with file.open("wb") as out:
        began, written = time.monotonic(), 0
        while written < nbytes and time.monotonic() - began < MEASURED_S:
            written += out.write(part[: nbytes - written])
        out.flush()
        os.fsync(out.fileno())
        write = written / max(time.monotonic() - began, 1e-6)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with file.open("rb", buffering=0) as source:
        began, read = time.monotonic(), 0
        while time.monotonic() - began < MEASURED_S and (got := source.read(_PART)):
            read += len(got)
        return write, read / max(time.monotonic() - began, 1e-6)
