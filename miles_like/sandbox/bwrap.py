"""The command line of a bubblewrap sandbox."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from miles_like.sandbox.config import SandboxConfig

PYTHON = "/usr/bin/python3"
_HOST_LINKS = ("lib", "lib64", "bin", "sbin")  # of a merged /usr
_FIRST_USER, _USERS = 1 << 20, 64  # a block of users for each process of this machine that has a pool
_MOST_PROCESSES = 1 << 22  # the kernel's largest pid_max


def bwrap_command(config: SandboxConfig, slot: int, inner: Sequence[str]) -> list[str]:
    """The sandbox of a slot, whose process 1 is the interpreter with the arguments `inner`."""
    size = str(config.disk_mb << 20)
    words = [
        "bwrap",
        *("--unshare-all", "--unshare-user", "--disable-userns", "--as-pid-1", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"),
        *("--setenv", "PATH", "/usr/local/bin:/usr/bin:/bin", "--setenv", "HOME", "/tmp"),
        *("--setenv", "PYTHONHASHSEED", "0", "--setenv", "LANG", "C.UTF-8"),
        *("--ro-bind", "/usr", "/usr"),
    ]
    for name in _HOST_LINKS:
        if os.path.islink(f"/{name}"):
            words += ["--symlink", f"usr/{name}", f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            words += ["--ro-bind", f"/{name}", f"/{name}"]
    for path in config.read_only:
        words += ["--ro-bind", path, path]
    words += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--size", size, "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--"]
    return [*_other_user(slot), *words, config.python or PYTHON, *inner]


def _other_user(slot: int) -> list[str]:
    """As root: a user for each slot, since the kernel counts processes by user, and never root's."""
    if os.geteuid() != 0:
        return []
    user = _FIRST_USER + (os.getpid() % _MOST_PROCESSES) * _USERS + slot % _USERS
    if not _is_mapped(user):  # in a container with few users
        user = 60_000 + slot
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def _is_mapped(user: int) -> bool:
    rows = Path("/proc/self/uid_map").read_text().splitlines()
    return any(int(first) <= user < int(first) + int(n) for first, _, n in map(str.split, rows))


def missing_program(config: SandboxConfig) -> str | None:
    """The first program that is not installed, and how to install it."""
    for name, package in (("bwrap", "bubblewrap"), ("setpriv", "util-linux")):
        if shutil.which(name) is None:
            return f"the program {name}, which is not installed: apt-get install {package}"
    python = config.python or PYTHON
    return None if os.path.exists(python) else f"the interpreter {python}, which does not exist: set sandbox.python"
