"""Where and with which environment the actors of a run are started, and what all of them share."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, TypedDict

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles_like.nodes.members import Node
from miles_like.nodes.waits import on_node
from miles_like.variables import set_variables
from rollout.sglang.ports import free_port


class _ActorOptions(TypedDict):
    """Keywords of `options` of a Ray actor's class."""

    num_cpus: int
    num_gpus: int
    scheduling_strategy: NodeAffinitySchedulingStrategy
    runtime_env: dict[str, dict[str, str]]


def actor_options(node: Node, environment: Mapping[str, str]) -> _ActorOptions:
    """The actor takes no GPU from Ray, whose reservation of the run has them all: `environment` names its devices.

    environment: without secrets, because Ray logs and shows a runtime_env. It has to be there before the process
    imports its libraries; the actor sets it again, because Ray may have replaced CUDA_VISIBLE_DEVICES since.
    """
    return {
        "num_cpus": 0,
        "num_gpus": 0,
        "scheduling_strategy": on_node(node.id),
        "runtime_env": {"env_vars": dict(environment)},
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
    """Base of all actors: redirects the output to a log, sets its environment, and makes SIGUSR1 write stacks to the
    log."""

    beside: ClassVar[Mapping[str, int]] = {}
    """Groups of methods that run beside the others, which run one after the other: how many calls of each at once."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        """environment: variables and secrets; they replace what the process has inherited from the node's Ray."""
        _log_to(log)
        self.set_environment(environment)
        # faulthandler runs in C, so that it works where this process hangs and holds the interpreter lock
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray has read it; servers and subprocesses of users' code must not

    @staticmethod
    def set_environment(environment: Mapping[str, str]) -> None:
        set_variables(environment)

    def address(self) -> tuple[str, int]:
        """This node's address, and a port of it that is held for this process."""
        host, port, self._held = _held_address()
        return host, port

    def pid(self) -> int:
        return os.getpid()


ActorClass = type[Process]
ACTOR_S = 300.0  # time limit for Ray to start a process
