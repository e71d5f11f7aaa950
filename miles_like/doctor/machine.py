"""Limits and sizes of a Linux machine: memory, shared memory, ulimits, cgroup, ports, and its name in /etc/hosts."""

from __future__ import annotations

import resource
import shutil
import socket
from pathlib import Path
from typing import TypedDict

import psutil

from miles_like.nodes.probe import ephemeral_ports

_ULIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "stack": resource.RLIMIT_STACK,
}
_CGROUP = Path("/sys/fs/cgroup")
# (cgroup v2 file, controller and file of v1)
_LIMITS = {
    "memory": ("memory.max", ("memory", "memory.limit_in_bytes")),
    "pids": ("pids.max", ("pids", "pids.max")),
}


class MachineFacts(TypedDict):
    """One machine. -1: no limit."""

    cores: int
    memory: int  # bytes
    memory_available: int
    shm: int  # bytes of /dev/shm
    shm_free: int
    ulimits: dict[str, int]  # name -> soft limit: descriptors, bytes, processes, bytes
    cgroup: str  # "v2", "v1" or "none"
    cgroup_memory: int
    cgroup_pids: int
    cgroup_cpus: float
    ephemeral_ports: tuple[int, int]  # from which the kernel takes a connection's
    name_resolves_to: list[str]  # addresses of the machine's name
    interface: str | None  # of the node's address in the cluster


def machine_facts(address: str | None) -> MachineFacts:
    """address: by which the other nodes reach this one."""
    memory, shm = psutil.virtual_memory(), _usage(Path("/dev/shm"))
    version, limits = cgroup_limits(_CGROUP, Path("/proc/self/cgroup"))
    return {
        "cores": psutil.cpu_count() or 1,
        "memory": memory.total,
        "memory_available": memory.available,
        "shm": shm[0],
        "shm_free": shm[1],
        "ulimits": {name: resource.getrlimit(number)[0] for name, number in _ULIMITS.items()},
        "cgroup": version,
        "cgroup_memory": int(limits["memory"]),
        "cgroup_pids": int(limits["pids"]),
        "cgroup_cpus": limits["cpus"],
        "ephemeral_ports": ephemeral_ports(),
        "name_resolves_to": _addresses(socket.gethostname()),
        "interface": interface_of(address),
    }


def interface_of(address: str | None) -> str | None:
    """The network interface that has the address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            return str(name)
    return None


def cgroup_limits(root: Path, of_process: Path) -> tuple[str, dict[str, float]]:
    """(version, tightest limits of the process's group and those above it): `memory` in bytes, `pids`, `cpus`; -1
    where there is none."""
    limits: dict[str, float] = {"memory": -1, "pids": -1, "cpus": -1}
    try:
        groups = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in of_process.read_text().splitlines()}
    except (OSError, IndexError):
        return "none", limits
    if (root / "cgroup.controllers").exists():
        for directory in _and_above(root, groups.get("", "/")):
            for name, (file, _) in _LIMITS.items():
                limits[name] = _tighter(limits[name], _number(directory / file))
            limits["cpus"] = _tighter(limits["cpus"], _ratio(_words(directory / "cpu.max")))
        return "v2", limits
    if not (root / "memory").is_dir():
        return "none", limits
    paths = {one: path for names, path in groups.items() for one in names.split(",")}
    for name, (_, (controller, file)) in _LIMITS.items():
        for directory in _and_above(root / controller, paths.get(controller, "/")):
            limits[name] = _tighter(limits[name], _number(directory / file))
    for directory in _and_above(root / "cpu", paths.get("cpu", "/")):
        words = [*_words(directory / "cpu.cfs_quota_us"), *_words(directory / "cpu.cfs_period_us")]
        limits["cpus"] = _tighter(limits["cpus"], _ratio(words))
    return "v1", limits


def _and_above(root: Path, group: str) -> list[Path]:
    path = root / group.strip("/")
    return [path, *[p for p in path.parents if p.is_relative_to(root)]]


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _number(file: Path) -> float:
    """-1 for "max", a missing file, and the number near 2**63 that v1 writes for no limit."""
    words = _words(file)
    value = float(words[0]) if words and words[0].lstrip("-").isdecimal() else -1.0
    return value if value < 2**62 else -1.0


def _ratio(words: list[str]) -> float:
    """Cores from (quota, period) in microseconds."""
    if len(words) != 2 or not all(word.isdecimal() for word in words):
        return -1.0
    return int(words[0]) / int(words[1])


def _tighter(one: float, other: float) -> float:
    return max(one, other) if min(one, other) < 0 else min(one, other)


def _usage(path: Path) -> tuple[int, int]:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return 0, 0
    return usage.total, usage.free


def _addresses(name: str) -> list[str]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(sockaddr[0]) for *_, sockaddr in found})
