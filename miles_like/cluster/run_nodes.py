"""The nodes of one run, on which its ranks and servers are started."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from miles_like.cluster.actors import ActorClass, actor_options
from miles_like.cluster.environment import driver_secrets, process_environment
from miles_like.cluster.placement import Slot
from miles_like.config.sections.cluster import ClusterConfig
from miles_like.nodes.facts import NodeFacts
from miles_like.nodes.members import Node
from miles_like.nodes.waits import get_result, on_node

_CLOCK_S = 5.0  # for a node to tell its time


class _Clock:
    """An actor that has nothing else to do, so that it answers at once."""

    def read(self) -> tuple[str, int]:
        return socket.gethostname(), time.time_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNodes:
    """The nodes of a run: number k of a placement is `nodes[k]`."""

    nodes: tuple[Node, ...]
    facts: tuple[NodeFacts, ...]
    cluster: ClusterConfig
    server_env: Mapping[str, str] = field(default_factory=dict)  # `rollout.env`
    local: bool = False  # in a Ray that this process started

    def of(self, slot: Slot) -> Node:
        """The node of a slot."""
        return self.nodes[slot.node]

    def environment(self, slot: Slot) -> dict[str, str]:
        """The variables of the process in `slot`, without secrets. Raises as `process_environment`."""
        return process_environment(
            slot,
            self.facts[slot.node],
            env=self._env(slot),
            node_gpus=self.of(slot).gpus,
            stage_dir=self.cluster.stage_dir,
            local=self.local,
        )

    def start(self, actor_class: ActorClass, slot: Slot, log: Path) -> Any:
        """Begin to start an actor in `slot`, which writes to `log`; returns its handle."""
        environment = self.environment(slot)
        remote: Any = ray.remote  # whose types lack this keyword
        groups = dict(actor_class.beside)
        actor = remote(concurrency_groups=groups)(actor_class) if groups else remote(actor_class)
        of_actor = actor.options(**actor_options(self.of(slot), environment))
        return of_actor.remote(log.resolve(), environment | driver_secrets(self._env(slot)))

    def clocks(self) -> list[Callable[[], tuple[str, int]]]:
        """For each node of the run but this process's, a function that asks it for its host and its time, in
        nanoseconds as `time.time_ns` counts, and raises RuntimeError where it does not answer."""
        here = ray.get_runtime_context().get_node_id()
        clock: Any = ray.remote(num_cpus=0)(_Clock)
        asks: list[Callable[[], tuple[str, int]]] = []
        for node in {node.id: node for node in self.nodes if node.id != here}.values():
            actor = clock.options(scheduling_strategy=on_node(node.id)).remote()
            asks.append(partial(_told, actor, f"the clock of node {node.address}"))
        return asks

    def _env(self, slot: Slot) -> Mapping[str, str]:
        return self.server_env if slot.role in ("rollout", "teachers") else self.cluster.env


def _told(actor: Any, name: str) -> tuple[str, int]:
    host, at = get_result(actor.read.remote(), name, _CLOCK_S)
    return str(host), int(at)
