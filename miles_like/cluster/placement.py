"""Assign processes to nodes and GPUs: arithmetic only, no Ray.

Ranks of a role fill the GPUs of its pool node by node. Megatron numbers ranks tp-cp-ep-dp-pp, the tensor-parallel ones
next to each other and the pipeline stages farthest apart, so:

- a tensor-parallel group is on one node if it is not larger than the pool's GPUs of a node, and on whole nodes
  otherwise; a layout in which it would take parts of two nodes is refused;
- the ranks of a pipeline stage are consecutive, and the next stage begins where a stage ends;
- an expert-parallel group is parallel.ep * parallel.etp consecutive ranks, on the fewest nodes wherever that number
  divides the pool's GPUs of a node or is a multiple of it.

Nodes are numbered in the order in which `miles_like.nodes.members` chooses them, neighbours in the network first, so
consecutive numbers are near each other. Rollout servers fill their pool in the same way. Where trainer and rollout have
a GPU in common, they share that GPU and take turns on it (colocation); which GPUs are shared is decided for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_bridge.config import ParallelConfig
from miles_like.config.sections.cluster import ClusterConfig, Pool, PoolName, server_places
from rollout.config import RolloutConfig

Role = PoolName


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One process."""

    role: Role
    index: int  # rank of the trainer, critic or reference, or number of the rollout's or the teachers' server
    node: int
    gpus: tuple[int, ...]  # positions among the node's GPUs that the run has reserved; empty on CPU
    node_rank: int = 0  # in a server that spans nodes
    nnodes: int = 1
    stock: bool = False  # of a server of stock SGLang


class PortShare(NamedTuple):
    """Which of a run's servers some are: stock ones have consecutive ports, of which no two have the same."""

    first: int  # number of the first of them
    of: int  # all servers


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    slots: tuple[Slot, ...]

    def of(self, role: Role) -> tuple[Slot, ...]:
        return tuple(s for s in self.slots if s.role == role)

    def critics(self) -> tuple[Slot, ...]:
        """Slots of the critic ranks: those of its pool; without one, each has node and GPUs of the trainer rank of the
        same number."""
        return self.of("critic") or tuple(replace(s, role="critic") for s in self.of("trainer"))

    def ports_of(self, role: Role) -> PortShare:
        """The share of the servers of a role in the ports of the run's servers: the rollout's, then the teachers'."""
        rollout = len({s.index for s in self.of("rollout")})
        teachers = 1 + max((s.index for s in self.of("teachers") if s.stock), default=-1)
        return PortShare(0 if role == "rollout" else rollout, rollout + teachers)

    @property
    def nodes(self) -> int:
        return 1 + max(s.node for s in self.slots)

    @property
    def shared_gpus(self) -> frozenset[tuple[int, int]]:
        """(node, GPU) that a rank of the trainer or critic and a rollout server have in common."""
        sides = ({(s.node, gpu) for s in self.slots if s.role in of for gpu in s.gpus} for of in (_TRAINED, _SERVED))
        return frozenset.intersection(*map(frozenset, sides))


_TRAINED, _SERVED = ("trainer", "critic"), ("rollout",)


def plan_placement(
    cluster: ClusterConfig,
    parallel: ParallelConfig,
    rollout: RolloutConfig | None,
    teachers: Sequence[RolloutConfig] = (),
) -> PlacementPlan:
    """The node and GPUs of each rank and server. rollout: None for a run without servers. teachers: the settings of the
    servers that the run starts for them: stock ones on GPUs of their pool, embedded ones on its nodes in turn, on CPU.

    Critic and reference ranks have separate slots only with a pool. Raises ValueError as `ClusterConfig.pools_of`,
    when a tensor-parallel group or a server takes parts of nodes, and when a pool of servers has too few GPUs.
    """
    pools = cluster.pools_of(parallel.world_size)
    slots = list(_ranks("trainer", pools["trainer"], parallel))
    for role in ("critic", "reference"):
        if cluster.pools.of(role) is not None:
            slots += _ranks(role, pools[role], parallel)
    if rollout is not None:
        slots += _servers("rollout", [rollout] * rollout.servers, pools["rollout"], cluster)
        slots += _servers("teachers", teachers, pools["teachers"], cluster)
    return PlacementPlan(tuple(slots))


def _ranks(role: Role, pool: Pool, parallel: ParallelConfig) -> list[Slot]:
    world, width, tp = parallel.world_size, len(pool.gpus), parallel.tp
    if not width:
        nodes = len(pool.nodes)
        return [Slot(role=role, index=r, node=pool.nodes[r % nodes], gpus=()) for r in range(world)]
    if world > width and (width % tp if tp <= width else tp % width):
        raise ValueError(
            f"parallel.tp = {tp} neither divides nor is a multiple of the {width} GPUs of a node that the {role} "
            f"has ({pool.keys}): a tensor-parallel group would span parts of two nodes; set parallel.tp or the "
            "number of GPUs so that groups fill nodes"
        )
    return [Slot(role=role, index=r, node=node, gpus=(gpu,)) for r, (node, gpu) in enumerate(pool.places[:world])]


def _servers(role: Role, servers: Sequence[RolloutConfig], pool: Pool, cluster: ClusterConfig) -> list[Slot]:
    """servers: the settings of each."""
    stock = [one.engine == "sglang" for one in servers]
    on_gpus = [s for s in range(len(servers)) if pool.gpus and (stock[s] or role == "rollout")]
    widths = [servers[s].gpus_per_server for s in on_gpus]
    for s, width in zip(on_gpus, widths, strict=True):
        _check_width(role, width, pool, cluster, vllm=servers[s].engine == "vllm")
    places = dict(zip(on_gpus, server_places(pool, widths), strict=True))
    if any(len(places[s]) < width for s, width in zip(on_gpus, widths, strict=True)):
        needs = "rollout needs" if role == "rollout" else "teachers need"
        remedy = "lower rollout.servers or raise cluster.nodes" if role == "rollout" else f"raise {pool.keys}"
        each = f"{len(widths)} servers x {widths[0]} GPUs" if len(set(widths)) == 1 else f"servers of {widths} GPUs"
        raise ValueError(
            f"{needs} {each} = {sum(widths)}, but only {len(pool.places)} are available ({pool.keys}): {remedy}"
        )
    slots = []
    for s, of in enumerate(stock):
        if s not in places:
            slots.append(Slot(role=role, index=s, node=pool.nodes[s % len(pool.nodes)], gpus=(), stock=of))
            continue
        per_node = min(len(places[s]), len(pool.gpus))
        parts = [places[s][k : k + per_node] for k in range(0, len(places[s]), per_node)]
        for k, part in enumerate(parts):
            gpus = tuple(gpu for _, gpu in part)
            slots.append(Slot(role=role, index=s, node=part[0][0], gpus=gpus, node_rank=k, nnodes=len(parts), stock=of))
    return slots


def _check_width(role: Role, width: int, pool: Pool, cluster: ClusterConfig, *, vllm: bool) -> None:
    """Raises ValueError for a server of `width` GPUs that takes parts of nodes."""
    per_node = len(pool.gpus)
    if (width > per_node and width % per_node) or (width < per_node and per_node % width):
        pool_of = "" if cluster.pools.of(role) is None else f", of which cluster.pools.{role} has {per_node}"
        own = "rollout.vllm.tensor_parallel_size" if vllm else "rollout.sglang.tp_size"
        key = own if role == "rollout" else "tp_size of a teacher's server"
        raise ValueError(
            f"{key} = {width} neither divides nor is a multiple of cluster.gpus_per_node = "
            f"{cluster.gpus_per_node}{pool_of}: change one of them"
        )
