"""Safe reading of untrusted files: regular files of bounded size, inside the directory that names them.

A FIFO blocks the process that opens it, a device never ends, and a link can lead to any file of this machine. All are
refused before they are opened. Parsing JSON raises ValueError where the interpreter would raise RecursionError.
"""

from __future__ import annotations

import json
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

MIB = 1 << 20
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file. Raises ValueError for a file of another kind, without opening it, and
    OSError as `os.open` does."""
    _check_regular(path, path.stat().st_mode)
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(path, os.fstat(fd).st_mode)  # the path may have been replaced in between
    except ValueError:
        os.close(fd)
        raise
    return fd


def _check_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "of an unknown kind")
        raise ValueError(f"{path} is {kind}, not a regular file: replace it with the file itself")


def read_regular(path: Path, limit: int) -> bytes:
    """All bytes of a regular file. Raises ValueError for a file of another kind or of more than `limit` bytes, OSError
    as `os.open` does."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{path} has more than {limit:,} bytes, the limit for such a file: use a smaller file")
    return data


def read_text(path: Path, limit: int) -> str:
    """`read_regular`, decoded. Raises ValueError for bytes that are not UTF-8."""
    return read_regular(path, limit).decode("utf-8")


def json_lines(text: str) -> list[str]:
    """The lines of a file with a JSON value in each. `str.splitlines` would cut texts in them at U+2028 and others,
    which JSON leaves as they are."""
    return text.removesuffix("\n").split("\n") if text else []


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """`json.loads` with `object_pairs_hook=pairs`. Raises ValueError on every failure, also on deep nesting."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("values are nested too deep") from None


def read_json(path: Path, limit: int, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """A JSON file. Raises ValueError for invalid JSON and as `read_regular` does, OSError as `os.open` does."""
    return parse_json(read_text(path, limit), pairs)


def read_own(path: Path, directory: Path, limit: int) -> bytes:
    """`read_regular` of a file inside `directory`. Raises ValueError as `read_regular` and `check_inside` do."""
    check_inside(path, directory)
    return read_regular(path, limit)


def replace_bytes(path: Path, data: bytes) -> None:
    """Atomically replace `path` by a new file of `data`; a link at `path` is replaced, not followed."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:64]}.")
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def is_inner_name(name: object) -> bool:
    """Whether `name` is a relative path without `..`."""
    if not isinstance(name, str) or not name or "\0" in name or "\\" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def check_inside(path: Path, directory: Path) -> None:
    """Raises ValueError where `path`, found in `directory`, is a link to a file outside of it.

    The links of a Hugging Face hub cache, from snapshots/REVISION into ../../blobs, are allowed.
    """
    try:
        real, root = path.resolve(), directory.resolve()
    except (RuntimeError, OSError):
        raise ValueError(f"{path} is a link to itself: replace it with the file") from None
    in_cache = root.parent.name == "snapshots" and real.parent == root.parent.parent / "blobs"
    if not real.is_relative_to(root) and not in_cache:
        raise ValueError(
            f"{path} is a link to {real}, outside {directory}: copy the file there, or use the directory that "
            "contains it"
        )
