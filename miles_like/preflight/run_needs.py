"""The numbers of a run that its nodes are checked against."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from miles_like.cluster.environment import network_variables, plain_values
from miles_like.cluster.placement import PlacementPlan, plan_placement
from miles_like.cluster.server_ports import server_ports
from miles_like.config.run import RunConfig
from miles_like.config.sections.distillation import MadeServer
from miles_like.doctor.findings import Needs, Ports

Shared = Mapping[str, Mapping[int, str]]  # as `Needs.shared`
CHECKPOINTS = "trainer ranks write their checkpoints there"
PUBLISHED = "rollout servers read published weights there (publish.path = 'disk' or 'delta')"
MADE = "the ranks that make a checkpoint ([model.make], a teacher's make) load weights there"


def run_needs(config: RunConfig, run_dir: Path | None = None) -> Needs:
    """The numbers of the run with this configuration; imports no torch. run_dir: None: not known, and not examined."""
    c, servers = config.cluster, config.servers
    te = ("transformer-engine", "transformer-engine-torch") if config.kernels.spec == "te" else ()
    flex = ("deep-ep",) if config.kernels.dispatcher == "flex" else ()
    engine_packages: tuple[str, ...] = ()
    if servers is not None and servers.engine == "sglang":
        deep_ep = ("deep-ep",) if servers.sglang.moe_a2a_backend == "deepep" else ()
        engine_packages = ("torch", "sglang", *deep_ep)
    if servers is not None and servers.engine == "vllm":
        engine_packages = ("torch", "vllm")
    shared, either = _directories(config, run_dir)
    return Needs(
        nodes=c.nodes,
        gpus_per_node=c.gpus_per_node,
        ports=partial(_ports, config),
        shared=shared,
        either=either,
        local=() if c.stage_dir is None else (c.stage_dir,),
        packages=("torch", "megatron-core", "ray", *te, *flex),
        engine=sys.executable if servers is None else servers.python or sys.executable,
        engine_packages=engine_packages,
        sandbox=config.sandbox,
        environment=plain_values(c.env),
        network=partial(network_variables, env=plain_values(c.env)),
    )


def run_dir_needs(config: RunConfig, plan: PlacementPlan) -> dict[int, str]:
    """Nodes that must see the run directory of the machine that starts the run: number of the node in the plan -> the
    reason."""
    published = plan.of("rollout") if config.publish.path in ("disk", "delta") else ()
    return {s.node: PUBLISHED for s in published} | {
        s.node: CHECKPOINTS for s in (*plan.of("trainer"), *plan.critics())
    }


def cache_needs(config: RunConfig, plan: PlacementPlan) -> dict[int, str]:
    """Nodes that must see the cache directory of the machine that starts the run: number of the node in the plan -> the
    reason. A node that is not listed copies the files that it needs."""
    teachers = config.distillation.teachers.values()
    makes = config.model.make is not None or any(isinstance(t.part, MadeServer) for t in teachers)
    return {s.node: MADE for s in plan.of("trainer")} if makes else {}


def _directories(config: RunConfig, run_dir: Path | None) -> tuple[Shared, tuple[str, ...]]:
    """Those that nodes must see as one, and those that may be on each node's own disk."""
    plan = plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts)
    shared: dict[str, dict[int, str]] = {}
    cache = config.cache_dir
    if run_dir is not None:
        shared[str(run_dir)] = run_dir_needs(config, plan)
        cache = cache or str(run_dir.parent / "cache")
    if cache is None:
        return shared, ()
    if needs := cache_needs(config, plan):
        return shared | {cache: needs}, ()
    return shared, (cache,)


def _ports(config: RunConfig, ranges: Sequence[tuple[int, int]]) -> Ports:
    if config.servers is None or not ranges:
        return {}
    plan = plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts)
    return server_ports(plan, config.servers, ranges, teachers=config.teacher_rollouts)
