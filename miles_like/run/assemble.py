"""The composition root: connects the pipeline's stages and the commands to concrete trainers, servers and clusters.

Slow libraries (Ray, transformers, datasets, matplotlib, torch's checkpoint writer) are imported in the functions that
use them, so that a dry run, a finished stage or a mistyped key does not wait for them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.deterministic import environment
from megatron_bridge.plan.kernels import describe_kernels
from miles_like.cluster.placement import plan_placement
from miles_like.config.run import RunConfig
from miles_like.hf.checkpoint import read_config_file
from miles_like.loop.stopping import run_to_end
from miles_like.pipeline.stages import (
    Preflight,
    Sizes,
    Stage,
    StageFunctions,
    cache_of,
    plan_stages,
    run_stages,
)
from miles_like.run.model_plan import PlannedModel, model_plan, planned_model
from miles_like.run.rollout_side import RolloutSide, server_launch
from miles_like.storage.staging import StageFiles
from miles_like.verify.report import Report as AlignmentReport
from quant.hf_config import quantized_config
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from rollout.sglang.servers import embedded_command, sglang_command

if TYPE_CHECKING:
    from miles_like.run.verify import VerifyOptions


def stage_functions(
    config: RunConfig, model: PlannedModel | None, console: Console, ray_address: str | None
) -> StageFunctions:
    """The functions of the five stages; the first that uses Ray starts it. model: None: known once it is fetched."""

    def make(config: RunConfig, out: Path) -> None:
        from miles_like.nodes.session import start_ray
        from miles_like.pipeline.make_checkpoint import make_checkpoint

        start_ray(ray_address)
        make_checkpoint(config, out, console)

    def stage(work: StageFiles) -> Sequence[Mapping[str, Any]]:
        from miles_like.nodes.session import start_ray
        from miles_like.nodes.work import on_every_node

        start_ray(ray_address)
        return on_every_node(work, timeout_s=config.cluster.timeout_s)

    def train(config: RunConfig, run_dir: Path, served: Path, weights: Path, resume: bool) -> None:
        from miles_like.nodes.session import start_ray

        start_ray(ray_address)
        if config.servers is None:
            from miles_like.run.supervised import train_supervised

            train_supervised(model_plan(config, run_dir, served, weights), console, resume=resume)
        else:
            from miles_like.run.train import train as train_with_rollout

            train_with_rollout(model_plan(config, run_dir, served, weights), console, resume=resume)

    def convert(hf_dir: Path, out: Path) -> None:
        from miles_like.pipeline.convert import ConvertWork, to_megatron

        c, p = config.convert, config.parallel
        cluster = ray_address if config.cluster.nodes > 1 else None
        work = ConvertWork(int(c.memory_limit_gib * (1 << 30)), c.workers, cluster, config.cluster.timeout_s)
        to_megatron(hf_dir, out, work, tp=p.tp, pp=p.pp, ep=p.ep, etp=p.etp)

    def preflight(stages: Sequence[Stage], to_do: Sequence[str], online: bool) -> Preflight:
        from miles_like.preflight.checks import Preflight

        return Preflight(config, stages, to_do, ray_address, online=online)

    return StageFunctions(
        make=make,
        convert=convert,
        on_every_node=stage,
        train=train,
        sizes=None if model is None else _sizes(model),
        preflight=preflight,
    )


def shut_down() -> None:
    """Stop Ray if a function of `stage_functions` started it."""
    session = sys.modules.get("miles_like.nodes.session")  # not imported unless a stage needed it
    if session is not None:
        session.stop_ray()


def known_model(config: RunConfig) -> PlannedModel | None:
    """The plan of the model, from a config.json that exists before anything is fetched; None where there is none. For a
    model that is made, with the format of `model.make`. Raises ValueError as `planned_model`."""
    given, make = config.model, config.model.make
    path = Path(make.config if make is not None else given.config or given.path)
    if make is None and given.config is None and not path.is_dir():
        return None
    path = path / "config.json" if path.is_dir() else path
    hf = read_config_file(path)
    return planned_model(config, hf if make is None else quantized_config(hf, make.spec()), path.parent)


def _sizes(model: PlannedModel) -> Sizes:
    fetched, bf16 = checkpoint_bytes(model.hf, model.stored)
    return Sizes(fetched=fetched, bf16=bf16, served=checkpoint_bytes(model.hf, model.spec)[0])


def checkpoint_bytes(hf: Mapping[str, Any], spec: QuantSpec | None) -> tuple[int, int]:
    """(bytes stored as `spec` says, bytes in BF16) of a model with this config.json; nothing is loaded. Raises
    ValueError for a shape that the format does not support."""
    tensors, codec = family_of(hf).bind(hf), codec_or_none(spec)
    stored = bf16 = 0
    for place, count in tensors.kinds(each_expert=spec is not None and spec.may_split_experts):
        size = math.prod(place.shape)
        plain = count * size * tensors.dtype(place.entry).itemsize
        bf16 += plain
        if codec is not None and spec is not None and spec.covers(place.hf_name, place.shape):
            parts = codec.layout(place.shape, place.hf_name).values()
            stored += count * sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts)
        else:
            stored += plain
    return stored, bf16


TURN = (
    "turns: servers up, servers release KV cache, weights and graphs, trainer is built, then in turns: trainer sleeps, "
    "servers resume weights, publication, KV cache and graphs resumed, generation, release, trainer wakes and trains"
)


def describe_processes(config: RunConfig, run_dir: Path, model: PlannedModel | None) -> list[str]:
    """Nodes, ranks and server command lines, as `--dry-run` prints them. model: None: not known yet."""
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    p = config.parallel
    lines = [
        f"layout: TP{p.tp} x PP{p.pp} x CP{p.cp} x DP{p.dp}, EP{p.ep} x ETP{p.etp} over the same {p.world_size} ranks"
    ]
    lines.append("kernels: checked once the model is fetched" if model is None else _describe_trainer(model))
    for node in range(plan.nodes):
        ranks = [s.index for s in plan.of("trainer") if s.node == node]
        servers = [
            str(s.index) if s.nnodes == 1 else f"{s.index} (part {s.node_rank + 1} of {s.nnodes})"
            for s in plan.of("rollout")
            if s.node == node
        ]
        trainer = f"trainer ranks {ranks[0]}-{ranks[-1]}" if ranks else "no trainer rank"
        if ranks and config.algorithm.has_critic:
            trainer += ", a rank of the critic beside each"
        lines.append(f"node {node}: {trainer}; rollout server {', '.join(servers) or 'none'}")
    stage = config.cluster.stage_dir
    served = (Path(stage) / "stage-..." if stage else cache_of(config, run_dir) / "stage-..." / "data") / "hf"
    routes = model is None or model.routing is not None
    for s in plan.of("rollout"):
        launch = server_launch(config, served, run_dir / "logs", s, routes=routes)
        port = (config.rollout.port or 30000) + s.index
        if config.rollout.engine == "embedded":
            command = embedded_command(launch, port)
        else:
            head = next(x for x in plan.of("rollout") if x.index == s.index and x.node_rank == 0)
            address = f"NODE{head.node}:{20000 + s.index}" if s.nnodes > 1 else None
            command = sglang_command(replace(launch, host=f"NODE{s.node}", dist_init_addr=address), port)
        lines.append(f"node {s.node} runs: {' '.join(command)}")
    if config.takes_turns:
        lines.append(TURN)
    return [*lines, *config.distillation.described()]


def _describe_trainer(model: PlannedModel) -> str:
    """The kernels of the trainer's ranks, in one line, assuming that GPU ranks have TransformerEngine."""
    resolved, kernels = model.resolved, describe_kernels(model.trainer, model.resolved.spec)
    if resolved.forward == "stock":
        return kernels
    variables = [f"{name}={values[0]}" for name, values in environment(resolved.forward).items()]
    return ", ".join([kernels, f"{resolved.forward} forward", *variables])


def staged(config: RunConfig, run_dir: Path, console: Console, ray_address: str | None) -> Path:
    """The directory of the job's checkpoint, made if it does not exist, with the folders `hf` (for servers) and
    `megatron`."""
    functions = stage_functions(config, known_model(config), console, ray_address)
    *before, _ = plan_stages(config, run_dir, functions, mode="fresh")
    return run_stages(before, [s.name for s in before], console, fresh=False)["stage"].root


def verify(
    config: RunConfig, run_dir: Path, console: Console, ray_address: str | None, options: VerifyOptions
) -> tuple[AlignmentReport, list[Path]]:
    """Start both sides on the job's checkpoint, made if it does not exist, and compare them; plots are written to
    `run_dir`/verify. Raises ValueError or RuntimeError."""
    root = staged(config, run_dir, console, ray_address)
    from miles_like.nodes.session import start_ray
    from miles_like.run.verify import VerifyRun
    from miles_like.verify.plots import write_plots

    run_dir.mkdir(parents=True, exist_ok=True)
    run = VerifyRun(RolloutSide(plan=model_plan(config, run_dir, root / "hf", root / "megatron")), options)
    run_to_end(run.meet())
    start_ray(ray_address)
    found = run.report()
    return found, write_plots(found, run_dir / "verify")
