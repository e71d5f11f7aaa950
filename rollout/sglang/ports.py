"""The ports of rollout servers: which ones a stock server binds, whether they are free, and which processes have them.

A port that is chosen before it is bound must lie outside of the kernel's ephemeral range, from which any outgoing
connection may take it. Facts about SGLang are of version 0.5.23, srt/server_args.py (PortArgs.init_new) and
srt/managers/data_parallel_controller.py.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

HTTP_PORT, DIST_INIT_PORT = 30000, 20000  # of server 0, where the kernel's range allows
BLOCK = 64  # ports from one server's dist_init port to the next server's
_DERIVED = 6  # ports after the dist_init port that attention data parallelism binds
_HANDSHAKE = 13  # distance of the port at which nodes exchange the ports of attention data parallelism
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LINUX_RANGE = (32768, 60999)
_LEAST = 1024  # lower ports require permissions
_FIRST_FREE = 15000  # of those that `free_port` tries


class Port(NamedTuple):
    """A port that a server binds, with what binds it and the configuration key that moves it."""

    number: int
    purpose: str
    key: str


def ephemeral_range() -> tuple[int, int]:
    """(first, last) port that the kernel gives to outgoing connections; Linux's default where it does not say."""
    try:
        low, high = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return _LINUX_RANGE
    return low, high


def first_port(default: int, count: int, ranges: Sequence[tuple[int, int]]) -> int:
    """The first of `count` consecutive ports outside of the ephemeral ranges of all nodes: `default` if it is, else the
    last below the ranges, else the first above. Raises ValueError when there is no room for them."""
    low, high = min(first for first, _ in ranges), max(last for _, last in ranges)
    if default + count <= low or default > high:
        return default
    if low - count >= _LEAST:
        return low - count
    if high + count < 1 << 16:
        return high + 1
    raise ValueError(
        f"the kernel uses ports {low} to {high} for outgoing connections, which leaves fewer than {count} ports "
        "for servers: narrow net.ipv4.ip_local_port_range on the nodes, or set rollout.port and "
        "rollout.sglang.dist_init_port"
    )


def first_ports(
    servers: int, *, http: int | None, dist_init: int | None, ranges: Sequence[tuple[int, int]]
) -> tuple[int, int]:
    """(HTTP port, dist_init port) of stock server 0 of a cluster: the configured ones; for None those of `first_port`.
    Raises ValueError as `first_port`."""
    return (
        first_port(HTTP_PORT, servers, ranges) if http is None else http,
        first_port(DIST_INIT_PORT, BLOCK * servers, ranges) if dist_init is None else dist_init,
    )


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now and, if possible, outside of the ephemeral range; another server may take it before it is
    used."""
    below = range(_FIRST_FREE, ephemeral_range()[0])
    for port in random.SystemRandom().sample(below, min(64, len(below))):
        if _is_free(port, host):
            return port
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def free_blocks(servers: int) -> int:
    """A dist_init port of server 0 for which the blocks of all servers are free on this machine now, at random: servers
    of two runs on one machine take different ones. Raises ValueError without any."""
    size = BLOCK * servers
    low = first_port(DIST_INIT_PORT, size, [ephemeral_range()])
    firsts = list(range(low, max(low + 1, min(HTTP_PORT, 1 << 16) - size), BLOCK))
    for first in random.SystemRandom().sample(firsts, k=len(firsts)):
        if all(_is_free(first + BLOCK * i + j, "") for i in range(servers) for j in range(_HANDSHAKE + 1)):
            return first
    raise ValueError(
        f"{servers} free blocks of {BLOCK} ports were not found from port {low} on: set "
        "rollout.sglang.dist_init_port to the first port of such blocks"
    )


def stock_ports(http: int, dist_init: int | None, *, attention_dp: bool, nnodes: int) -> list[Port]:
    """The ports that a stock server binds, or checks, on each of its nodes.

    dist_init: the port of its --dist-init-addr. Without one SGLang takes free ports by itself, except for attention
    data parallelism, whose ports are then those from port + 233 on.
    """
    out = [Port(http, "HTTP", "rollout.port")]
    moved = "rollout.sglang.dist_init_port"
    if dist_init is None:
        if not attention_dp:
            return out
        dist_init, moved = (http + 233 if http + 233 < 1 << 16 else http - 233), "rollout.port"
    out.append(Port(dist_init, "rendezvous of its ranks", moved))
    if attention_dp:
        out += [Port(dist_init + 1 + i, "attention data parallelism", moved) for i in range(_DERIVED)]
    if attention_dp and nnodes > 1:
        out.append(Port(dist_init + _HANDSHAKE, "attention data parallelism over nodes", moved))
    return out


def check_ports(ports: Sequence[Port], host: str, server: str) -> None:
    """Raises ValueError for the first port that is in use on this node, on any address. A server would notice it only
    after loading the model, or wait for it for half a minute."""
    for port in ports:
        if not _is_free(port.number, ""):
            raise ValueError(
                f"{server}: port {port.number} ({port.purpose}) is in use on node {socket.gethostname()} "
                f"({host}): set {port.key} to a different port, or stop the process that uses it"
            )


def _is_free(port: int, host: str) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            s.bind((host, port))
        except OSError:
            return False
    return True


def listeners(host: str, port: int) -> list[int | None]:
    """Process ids of the sockets that listen at a port of this machine where a connection to `host` arrives; None for a
    process of another user. Empty where the system does not say."""
    everywhere = {"0.0.0.0", "::"}
    try:
        wanted = {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)} | everywhere
        sockets = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return []
    return [
        s.pid
        for s in sockets
        if s.status == psutil.CONN_LISTEN and s.laddr.port == port and s.laddr.ip.removeprefix("::ffff:") in wanted
    ]
