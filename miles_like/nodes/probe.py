"""Probe a node for what a run needs: free disk, importable packages, the engine, GPUs, free ports. Runs on the node
itself."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from miles_like.nodes.sight import Probe
from miles_like.variables import environment_of, inherited

IMPORT_S = 300.0  # time limit of an import in a subprocess; SGLang takes 30 s on a cold disk


_VERSION = 'import importlib.metadata as m, json; print(json.dumps({{"version": m.version("{}")}}), flush=True)'


class EngineFound(TypedDict):
    """A stock engine in the environment of one interpreter."""

    version: str | None  # None: not installed
    wrong: str | None  # why it does not run; None: it runs


class ProbeResult(TypedDict):
    """The resources of one node."""

    node: str  # host name
    disks: dict[str, tuple[int, int]]  # path -> (device number, free bytes) of its file system
    unwritable: dict[str, str]  # path -> why it cannot be made or written
    held: dict[str, int]  # path -> bytes of the files that are below it already
    missing: dict[str, str]  # package -> why it is not installed, or does not import
    used: list[int]  # ports in use
    ephemeral: tuple[int, int]  # (first, last) port that the kernel gives to outgoing connections; (0, 0): not known
    sees: dict[str, bool]  # name of a directory of the driver -> whether the node sees it
    gpus: int
    engine: EngineFound | None  # None: not asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """A picklable probe of one node, which returns plain values."""

    paths: tuple[str, ...] = ()  # directories, which need not exist
    found: tuple[str, ...] = ()  # packages that must be installed
    ports: tuple[int, ...] = ()  # ports that must be free
    sees: Mapping[str, Probe] = field(default_factory=dict)  # directories of the driver, by a name
    engine: str | None = None  # interpreter that must have the stock engine; "": the one that runs the probe
    engine_package: str = "sglang"  # that engine
    imports: bool = True  # import the engine, which takes 30 s on a cold disk; False: ask for its version only

    def __call__(self, alive: Callable[[], None] = lambda: None) -> ProbeResult:
        missing = {name: why for name in self.found if (why := why_not_found(name)) is not None}
        alive()
        return {
            "node": socket.gethostname(),
            "disks": {path: disk_of(Path(path)) for path in self.paths},
            "unwritable": {p: why for p in self.paths if (why := why_not_writable(Path(p))) is not None},
            "held": {path: bytes_under(Path(path)) for path in self.paths},
            "missing": missing,
            "used": [port for port in self.ports if not is_free(port)],
            "ephemeral": ephemeral_ports(),
            "sees": {name: probe.is_seen() for name, probe in self.sees.items()},
            "gpus": gpus(),
            "engine": None
            if self.engine is None
            else find_engine(self.engine, self.engine_package, imports=self.imports),
        }


def find_engine(python: str, package: str = "sglang", *, imports: bool) -> EngineFound:
    """The engine `package` of the interpreter `python`, asked in a process with the environment that a server has. The
    version is printed before the import, which may fail."""
    if not python and not imports:
        try:
            return {"version": importlib.metadata.version(package), "wrong": None}
        except importlib.metadata.PackageNotFoundError as e:
            return {"version": None, "wrong": str(e)}
    try:
        done = subprocess.run(
            [python or sys.executable, "-c", _VERSION.format(package) + (f"; import {package}" if imports else "")],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=IMPORT_S,
            check=False,
            env=environment_of(python, inherited()) if python else inherited(),
        )
    except subprocess.TimeoutExpired:
        return {"version": None, "wrong": f"its import of {package} did not end within {IMPORT_S:g} s"}
    except OSError as e:
        return {"version": None, "wrong": f"it cannot be run: {e.strerror}"}
    version = None
    for line in done.stdout.splitlines():
        if line.startswith('{"version"'):
            version = str(json.loads(line)["version"])
    return {"version": version, "wrong": _last_line(done.stderr.splitlines()) if done.returncode else None}


def disk_of(path: Path) -> tuple[int, int]:
    """(device number, free bytes) of the file system where `path` is or would be created."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return os.stat(path).st_dev, shutil.disk_usage(path).free


def why_not_writable(path: Path) -> str | None:
    """Why no directory `path` can be made or written; None where it can."""
    there = next(p for p in (path.absolute(), *path.absolute().parents) if os.path.lexists(p))
    if not there.is_dir():
        return f"{there} is not a directory"
    return None if os.access(there, os.W_OK | os.X_OK) else f"no permission in {there}"


def bytes_under(path: Path) -> int:
    """Total size of all files below a directory; 0 where it does not exist."""
    return sum(p.lstat().st_size for p in path.rglob("*") if p.is_file()) if path.is_dir() else 0


def gpus() -> int:
    """The number of NVIDIA GPUs of this machine, counted by device files."""
    return sum(p.name.removeprefix("nvidia").isdecimal() for p in Path("/dev").glob("nvidia*"))


def ephemeral_ports(file: Path = Path("/proc/sys/net/ipv4/ip_local_port_range")) -> tuple[int, int]:
    """(first, last) port of the kernel's range; (0, 0) where there is no such file."""
    try:
        first, last = file.read_text().split()
    except (OSError, ValueError):
        return 0, 0
    return int(first), int(last)


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


def _last_line(lines: Sequence[str]) -> str:
    return next((line.strip() for line in reversed(lines) if line.strip()), "its import failed")
