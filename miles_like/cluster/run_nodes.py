"""The nodes of one run, on which its ranks and servers are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from miles_like.cluster.actors import ActorClass, actor_options
from miles_like.cluster.environment import driver_secrets, process_environment
from miles_like.cluster.placement import Slot
from miles_like.config.sections.cluster import ClusterConfig
from miles_like.nodes.facts import NodeFacts
from miles_like.nodes.members import Node


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

    def _env(self, slot: Slot) -> Mapping[str, str]:
        return self.server_env if slot.role in ("rollout", "teachers") else self.cluster.env
