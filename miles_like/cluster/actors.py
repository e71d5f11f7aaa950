"""Where and with which environment the actors of a run are started, and what all of them share."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TypedDict

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles_like.cluster.placement import PlacementPlan, Slot
from miles_like.nodes.members import node_ids
from miles_like.nodes.session import is_local
from miles_like.nodes.waits import on_node
from rollout.sglang.ports import free_port


def check_nodes(plan: PlacementPlan) -> None:
    """Raises ValueError when the placement needs more nodes than the cluster has."""
    have = len(node_ids())
    for slot in plan.slots:
        if slot.node >= have:
            raise ValueError(
                f"{slot.role} {slot.index} is placed on node {slot.node}; the Ray cluster has {have} nodes: "
                "start Ray on more, or lower cluster.nodes"
            )


_SHARE_OF_GPU = {"trainer": 0.6, "rollout": 0.4, "critic": 0.0}  # makes Ray put one of each on a GPU


class _ActorOptions(TypedDict):
    """Keywords of `options` of a Ray actor's class."""

    num_cpus: int
    num_gpus: float
    scheduling_strategy: NodeAffinitySchedulingStrategy
    runtime_env: dict[str, dict[str, str]]


def actor_options(slot: Slot) -> _ActorOptions:
    nodes = node_ids()
    # one thread per rank of a CPU run: the ranks share the cores
    environment = {"OMP_NUM_THREADS": "1"} if not slot.gpus else {}
    if slot.gpus and slot.role == "critic":  # on a trainer rank's GPU, all of which Ray has already assigned
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slot.gpus))
    if is_local():  # a local Ray listens on loopback only, and so must gloo and NCCL
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {
        "num_cpus": 0,
        "num_gpus": len(slot.gpus) * _SHARE_OF_GPU[slot.role],
        "scheduling_strategy": on_node(nodes[slot.node]),
        "runtime_env": {"env_vars": environment},
    }


def _log_to(path: Path) -> None:
    """Redirect stdout and stderr of this process to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _held_address() -> tuple[str, int, socket.socket]:
    """(this node's address in the cluster, a port of it, the socket that is bound to both).

    The port lies below those that the kernel gives to outgoing connections. While the socket is open and does not
    listen, no other program can bind the port except one that also sets SO_REUSEADDR, as the store of the ranks does.
    """
    host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    while True:
        family, *_, address = socket.getaddrinfo(host, free_port(host), type=socket.SOCK_STREAM)[0]
        held = socket.socket(family, socket.SOCK_STREAM)
        try:
            held.bind(address)  # without SO_REUSEADDR: fails where another program holds or uses the port
        except OSError:
            held.close()
            continue
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return host, int(held.getsockname()[1]), held


class Process:
    """Base of all actors: redirects the output to a log and makes SIGUSR1 write stacks to it."""

    def __init__(self, log: Path) -> None:
        _log_to(log)
        # faulthandler runs in C, so that it works where this process hangs and holds the interpreter lock
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray has read it; servers and subprocesses of users' code must not

    def address(self) -> tuple[str, int]:
        """This node's address, and a port of it that is held for this process."""
        host, port, self._held = _held_address()
        return host, port

    def pid(self) -> int:
        return os.getpid()


ACTOR_S = 300.0  # time limit for Ray to start a process
