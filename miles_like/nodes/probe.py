"""Probe a node for what a run needs: free disk, importable packages, GPUs, free ports. Runs on the node itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

IMPORT_S = 300.0  # time limit of an import in a subprocess; SGLang takes 30 s on a cold disk


class ProbeResult(TypedDict):
    """The resources of one node."""

    node: str  # host name
    disks: dict[str, tuple[int, int]]  # path -> (device number, free bytes) of its file system
    held: dict[str, int]  # path -> bytes of the files that are below it already
    missing: dict[str, str]  # package -> why it is not installed, or does not import
    used: list[int]  # ports in use
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """A picklable probe of one node, which returns plain values."""

    paths: tuple[str, ...] = ()  # directories, which need not exist
    found: tuple[str, ...] = ()  # packages that must be installed
    imported: tuple[str, ...] = ()  # packages that must also import, each tried in a subprocess
    ports: tuple[int, ...] = ()  # ports that must be free

    def __call__(self, alive: Callable[[], None] = lambda: None) -> ProbeResult:
        missing = {name: why for name in self.found if (why := why_not_found(name)) is not None}
        for name in self.imported:
            if (why := _why_not_imported(name)) is not None:
                missing[name] = why
            alive()
        return {
            "node": socket.gethostname(),
            "disks": {path: disk_of(Path(path)) for path in self.paths},
            "held": {path: bytes_under(Path(path)) for path in self.paths},
            "missing": missing,
            "used": [port for port in self.ports if not is_free(port)],
            "gpus": gpus(),
        }


def disk_of(path: Path) -> tuple[int, int]:
    """(device number, free bytes) of the file system where `path` is or would be created."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.stat(path).st_dev, shutil.disk_usage(path).free


def bytes_under(path: Path) -> int:
    """Total size of all files below a directory; 0 where it does not exist."""
    return sum(p.lstat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else 0


def gpus() -> int:
    """The number of NVIDIA GPUs of this machine, counted by device files."""
    return sum(p.name.removeprefix("nvidia").isdecimal() for p in Path("/dev").glob("nvidia*"))


def is_free(port: int) -> bool:
    """Whether no process listens on the port, on any address of this machine."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def why_not_found(package: str) -> str | None:
    """Why a package or dotted module is not installed for this Python; None where it is."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError) as e:
        return str(e)
    return None if spec is not None else f"No module named {package!r}"


def _why_not_imported(package: str) -> str | None:
    if (why := why_not_found(package)) is not None:
        return why
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {package}"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"its import did not end within {IMPORT_S:g} s"
    return _last_line(done.stderr.splitlines()) if done.returncode else None


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "its import failed")
