"""Assign processes to nodes and GPUs: arithmetic only, no Ray.

Trainer ranks fill nodes in order, so that tensor-parallel neighbours share a node. Rollout servers fill the same nodes
when colocated (on the same GPUs, on which the two sides take turns), and the nodes after the trainer's otherwise; a
server wider than a node takes consecutive whole nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from megatron_bridge.config import ParallelConfig
from miles_like.config.cluster import ClusterConfig
from rollout.config import RolloutConfig

Role = Literal["trainer", "critic", "rollout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One process."""

    role: Role
    index: int  # rank of the trainer or critic, or server number
    node: int
    gpus: tuple[int, ...]  # local GPU numbers; empty on CPU
    node_rank: int = 0  # in a server that spans nodes
    nnodes: int = 1


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    slots: tuple[Slot, ...]

    def of(self, role: Role) -> tuple[Slot, ...]:
        return tuple(s for s in self.slots if s.role == role)

    def critics(self) -> tuple[Slot, ...]:
        """Slots of the critic ranks: each has node and GPUs of the trainer rank of the same number."""
        return tuple(replace(s, role="critic") for s in self.of("trainer"))

    @property
    def nodes(self) -> int:
        return 1 + max(s.node for s in self.slots)


def plan_placement(cluster: ClusterConfig, parallel: ParallelConfig, rollout: RolloutConfig | None) -> PlacementPlan:
    """The node and GPUs of each trainer rank and server. rollout: None for a run without servers. Raises ValueError
    when a server's GPUs neither divide a node nor fill whole nodes, or when `cluster` has too few nodes for the
    servers."""
    world, per_node = parallel.world_size, cluster.gpus_per_node
    if not per_node:
        ranks = [Slot(role="trainer", index=r, node=r % cluster.nodes, gpus=()) for r in range(world)]
        number = rollout.servers if rollout is not None else 0
        servers = [Slot(role="rollout", index=s, node=s % cluster.nodes, gpus=()) for s in range(number)]
        return PlacementPlan((*ranks, *servers))
    ranks = [Slot(role="trainer", index=r, node=r // per_node, gpus=(r % per_node,)) for r in range(world)]
    if rollout is None:
        return PlacementPlan(tuple(ranks))
    width = rollout.sglang.tp_size if rollout.engine == "sglang" else 1
    first = -(-world // per_node) * per_node if cluster.colocate is False else 0
    if (width > per_node and width % per_node) or (width < per_node and per_node % width):
        raise ValueError(
            f"rollout.sglang.tp_size = {width} neither divides nor is a multiple of cluster.gpus_per_node = {per_node}"
        )
    servers = []
    for s in range(rollout.servers):
        start = first + s * width
        spans = max(1, width // per_node)
        for k in range(spans):
            gpus = range(start + k * per_node, start + min(width, (k + 1) * per_node))
            node = gpus[0] // per_node
            if node >= cluster.nodes:
                raise ValueError(
                    f"server {s} would start on node {node}, cluster.nodes = {cluster.nodes}: "
                    "lower rollout.servers or raise cluster.nodes"
                )
            local = tuple(g % per_node for g in gpus)
            servers.append(Slot(role="rollout", index=s, node=node, gpus=local, node_rank=k, nnodes=spans))
    return PlacementPlan((*ranks, *servers))
