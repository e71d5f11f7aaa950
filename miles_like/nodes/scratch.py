"""A directory of this user on a node's own disk, for what may be lost, such as compiled kernels."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def scratch_directory() -> str | None:
    """`miles-like-UID` in the temporary directory of this machine, which other users cannot write; None where none can
    be made. Where another user has made a directory of that name, or may write to it, it is a new one: kernels are
    loaded from there."""
    try:
        path = Path(tempfile.gettempdir(), f"miles-like-{os.getuid()}")
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
            return str(path)
        return tempfile.mkdtemp(prefix=f"{path.name}-")
    except OSError:
        return None
