"""The first lines of a dry run: the plan of a run at a glance, with bytes by stage, node and disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from miles_like.cluster.placement import PlacementPlan, plan_placement
from miles_like.config.run import RunConfig
from miles_like.config.sections.loop import CheckpointConfig
from miles_like.pipeline.stages import Sizes, Stage
from miles_like.preflight.disks import On, checkpoint_size, disk_needs, saved_checkpoints
from miles_like.staging.stage_files import NodeNeed

_SHOWN = 4  # different needs of nodes


def describe_plan(
    config: RunConfig,
    sizes: Sizes | None,
    stages: Sequence[Stage],
    to_do: Sequence[str],
    *,
    joins_cluster: bool = False,
) -> list[str]:
    """At most 10 lines: layout, nodes, bytes of each stage and node, checkpoints, disks. sizes: None: known once
    the model is fetched. joins_cluster: nodes may have separate disks. Raises ValueError as `plan_placement`."""
    plan, p = (
        plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts),
        config.parallel,
    )
    layout = f"TP{p.tp} x PP{p.pp} x CP{p.cp} x DP{p.dp}, EP{p.ep} x ETP{p.etp}"
    virtual = f", {p.vpp} virtual stages each" if p.vpp > 1 else ""
    lines = [
        f"layout: {layout}{virtual}: {p.world_size} trainer ranks",
        f"nodes: {_nodes(config, plan)}",
        f"servers: {_servers(config, plan)}",
    ]
    if sizes is None:
        return [*lines, "bytes: known once the model is fetched"]
    saved = describe_checkpoints(config.checkpoint, config.train.steps, _saved_bytes(config, sizes))
    return [
        *lines,
        f"bytes: {_stage_bytes(stages)}",
        _staging(sizes.nodes),
        f"checkpoints: {saved}",
        f"disks: {_disks(config, stages, to_do, joins_cluster=joins_cluster)}",
    ]


def decimal(nbytes: int) -> str:
    """9.39 TB, 671 GB, 12.0 kB: three digits, powers of 1000."""
    size, units = float(nbytes), ("B", "kB", "MB", "GB", "TB", "PB")
    unit = 0
    while size >= 999.5 and unit < len(units) - 1:
        size, unit = size / 1000, unit + 1
    digits = 0 if size >= 99.95 or not unit else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {units[unit]}"


def describe_checkpoints(checkpoint: CheckpointConfig, steps: int, nbytes: int | None) -> str:
    """When checkpoints are written, which are kept, and the most that they take. nbytes: of one; None: of adapters,
    which are small."""
    when = f"every {checkpoint.every} steps" if checkpoint.every else "after the last step"
    policy = f"keeps the last {checkpoint.keep}"
    policy += f" and those of every {checkpoint.keep_every} steps" if checkpoint.keep_every else ""
    policy += f" and the best by {checkpoint.keep_best}" if checkpoint.keep_best else ""
    if nbytes is None:
        return f"one of adapters {when}, {policy}"
    most = saved_checkpoints(checkpoint, steps)
    return (
        f"one is {decimal(nbytes)}, {when}, {policy}: at most {most} with the one being written, "
        f"{decimal(most * nbytes)}"
    )


def _saved_bytes(config: RunConfig, sizes: Sizes) -> int | None:
    return None if config.lora.rank else checkpoint_size(sizes.bf16) * (1 + config.algorithm.has_critic)


def _nodes(config: RunConfig, plan: PlacementPlan) -> str:
    gpus = config.cluster.gpus_per_node
    each = f" x {gpus} GPUs" if gpus else ", CPU ranks"
    with_ranks = {s.node for s in plan.of("trainer")}
    with_servers = {s.node for s in plan.of("rollout")}
    of = f"{len(with_ranks)} with trainer ranks, {len(with_servers)} with rollout servers"
    return f"{plan.nodes}{each}: {of}, {len(with_ranks & with_servers)} with both"


def _servers(config: RunConfig, plan: PlacementPlan) -> str:
    servers = config.servers
    if servers is None:
        return "none"
    parts = Counter(s.index for s in plan.of("rollout"))
    wide = max(parts.values())
    on_gpus = servers.on_gpus and config.cluster.gpus_per_node
    width = f", each of {servers.gpus_per_server} GPUs" if on_gpus else ""
    spans = f" over {wide} nodes" if wide > 1 else ""
    return f"{len(parts)} x {servers.engine}{width}{spans}"


def _stage_bytes(stages: Sequence[Stage]) -> str:
    found = [f"{s.name} {decimal(s.size)}" for s in stages if s.size is not None and s.name != "train"]
    return ", ".join(found)


def _staging(nodes: Sequence[NodeNeed]) -> str:
    """What nodes copy, equal ones together; the rest, if there are many different ones, as a range."""
    by_need: dict[NodeNeed, list[int]] = {}
    for number, need in enumerate(nodes):
        by_need.setdefault(need, []).append(number)
    needs = list(by_need)
    shown = [
        f"{_numbers(by_need[n])}: {decimal(n.total)} (served {decimal(n.served)}, shards {decimal(n.shards)})"
        for n in needs[:_SHOWN]
    ]
    if rest := needs[_SHOWN:]:
        least, most = (decimal(f(n.total for n in rest)) for f in (min, max))
        shown.append(f"{sum(len(by_need[n]) for n in rest)} other nodes: {least} to {most}")
    return f"staged by need: {'; '.join(shown)}"


def _numbers(numbers: Sequence[int]) -> str:
    """node 3; nodes 0-1, 4."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    text = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"node{'s' if len(numbers) > 1 else ''} {text}"


def _disks(config: RunConfig, stages: Sequence[Stage], to_do: Sequence[str], *, joins_cluster: bool) -> str:
    """Bytes that the stages to do will write below each directory."""
    cache = next(s.directory.parent for s in stages if s.name == "convert")
    words: dict[On, str] = {
        "here": "{} {}",
        "nodes": "{} of each node up to {}",
        "apart": f"{{}} of each node that does not see {cache} up to {{}} more",
    }
    by_place = Counter[tuple[On, Path]]()
    for need in disk_needs(config, stages, to_do, joins_cluster=joins_cluster):
        below = need.directory.parent
        by_place[need.on, cache if below.parent == cache else below] += need.bytes
    lines = [
        text.format(place, decimal(n)) for on, text in words.items() for (of, place), n in by_place.items() if of == on
    ]
    return ", ".join(lines) or "nothing is written"
