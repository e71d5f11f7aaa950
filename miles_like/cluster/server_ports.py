"""The ports that the rollout servers of a run bind on each node, before any server is started: arithmetic only."""

from __future__ import annotations

from collections.abc import Sequence

from miles_like.cluster.placement import PlacementPlan
from miles_like.nodes.facts import ServerPort
from rollout.config import RolloutConfig
from rollout.sglang.ports import BLOCK, Port, first_ports, stock_ports


def server_ports(
    plan: PlacementPlan,
    rollout: RolloutConfig,
    ranges: Sequence[tuple[int, int]],
    *,
    teachers: Sequence[RolloutConfig] = (),
    local: bool = False,
) -> dict[int, tuple[ServerPort, ...]]:
    """Node of the plan -> the ports of its servers, as `miles_like.cluster.rollout_servers.with_ports` gives them.

    teachers: settings of the servers that the run starts for them. ranges: ephemeral ranges of the nodes. local: Ray is
    started for the run. A port that is not configured is then any free one, as is that of an embedded server, and is
    not listed. Raises ValueError as `first_port`.
    """
    slots = [*plan.of("rollout"), *(s for s in plan.of("teachers") if s.gpus)]
    given = {"rollout.port": rollout.port is not None}
    http, dist_init = rollout.port or 0, 0
    if any(slot.stock for slot in slots):
        given["rollout.sglang.dist_init_port"] = rollout.sglang.dist_init_port is not None
        servers = plan.ports_of("rollout").of
        own = {"http": rollout.port, "dist_init": rollout.sglang.dist_init_port}
        http, dist_init = first_ports(servers, **own, ranges=ranges)
    out: dict[int, list[ServerPort]] = {}
    for slot in slots:
        of_all = plan.ports_of(slot.role).first + slot.index
        number = http + of_all
        ports = [Port(number, "HTTP", "rollout.port")]
        if slot.stock:
            dp = (rollout if slot.role == "rollout" else teachers[slot.index]).sglang.enable_dp_attention
            ports = stock_ports(number, dist_init + BLOCK * of_all, attention_dp=dp, nnodes=slot.nnodes)
        part = f" part {slot.node_rank}" if slot.nnodes > 1 else ""
        anywhere = local and slot.role == "teachers"  # rollout.port is of the rollout's servers
        name = "rollout server" if slot.role == "rollout" else "server of teacher"
        out.setdefault(slot.node, []).extend(
            ServerPort(number=p.number, server=f"{name} {slot.index}{part}", purpose=p.purpose, key=p.key)
            for p in ports
            if (given[p.key] or (slot.stock and not local)) and not (anywhere and p.key == "rollout.port")
        )
    return {node: tuple(ports) for node, ports in out.items()}
