"""Rollout servers, each owned by a Ray actor."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayError

from miles_like.cluster.actors import ACTOR_S, Process
from miles_like.cluster.placement import Slot
from miles_like.cluster.run_nodes import RunNodes
from miles_like.nodes.waits import get_result
from rollout.sglang.servers import ServerHandle, ServerLaunch, launch_server


class _Server(Process):
    """Owns one rollout server process, which ends with this actor."""

    handle: ServerHandle | None = None

    def start(self, launch: ServerLaunch, host: str, dist_init_addr: str | None) -> str:
        self.handle = launch_server(replace(launch, host=host, dist_init_addr=dist_init_addr))
        return self.handle.url

    def stop(self) -> None:
        if self.handle is not None:  # None where the launch failed
            self.handle.stop()


class RayServers:
    """Rollout servers, each owned by an actor on its node."""

    def __init__(
        self,
        launches: Sequence[tuple[Slot, ServerLaunch]],
        nodes: RunNodes,
        log_dir: Path,
        start_timeout_s: float = 600.0,
    ) -> None:
        """Begins to start all servers; `wait` returns once they answer. start_timeout_s: per try of a launch.

        On a cluster of several nodes a server listens on its node's address; the parts of a server that spans nodes
        connect to a port of its first node.
        """
        logs = [log_dir / f"rollout_actor{s.index}.{s.node_rank}.log" for s, _ in launches]
        self._actors = [nodes.start(_Server, s, log) for (s, _), log in zip(launches, logs, strict=True)]
        self._heads = [s.node_rank == 0 for s, _ in launches]
        self._started = []
        # for an actor that hangs: a launch limits each of the free ports that it tries
        self._limit = 3 * start_timeout_s + ACTOR_S
        hosts = [get_result(a.address.remote(), "a rollout actor", ACTOR_S) for a in self._actors]
        first_nodes: dict[int, str] = {}  # server -> HOST:PORT of its first node
        for (slot, launch), server, (ip, port) in zip(launches, self._actors, hosts, strict=True):
            if slot.node_rank == 0:
                first_nodes[slot.index] = f"{ip}:{port}"
            host = ip if len(nodes.nodes) > 1 else "127.0.0.1"
            init = first_nodes[slot.index] if slot.nnodes > 1 else None
            self._started.append(server.start.remote(launch, host, init))

    def wait(self) -> list[str]:
        """URL of every server. Raises RuntimeError when one did not start."""
        urls = [get_result(ref, f"rollout server {i}", self._limit) for i, ref in enumerate(self._started)]
        return [url for url, head in zip(urls, self._heads, strict=True) if head]

    def stop(self) -> None:
        """Stop all servers. Never raises, because it may run while another error propagates; the server of a dead actor
        has ended with it."""
        for a in self._actors:
            with contextlib.suppress(RayError):
                ray.get(a.stop.remote(), timeout=30)
            ray.kill(a)
