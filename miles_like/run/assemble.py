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
from typing import Any

from rich.console import Console

from megatron_bridge.config import TrainerConfig
from megatron_bridge.families.registry import family_of, with_scalar_head
from megatron_bridge.plan.deterministic import environment
from megatron_bridge.plan.kernels import describe_kernels
from megatron_bridge.plan.layout import check_layout
from megatron_bridge.plan.precision import served_spec
from megatron_bridge.plan.resolve import Resolved, resolve
from miles_like.cluster.placement import plan_placement
from miles_like.config.ranks import critic_config, trainer_config
from miles_like.config.run import ModelConfig, RunConfig
from miles_like.hf.checkpoint import read_config_file
from miles_like.loop.stopping import run_to_end
from miles_like.pipeline.rollout_checkpoint import served_config
from miles_like.pipeline.stages import (
    Preflight,
    Sizes,
    Stage,
    StageFunctions,
    cache_of,
    known_config,
    plan_stages,
    run_stages,
)
from miles_like.run.engine_support import check_engine
from miles_like.storage.staging import StageFiles
from miles_like.verify.report import Report as AlignmentReport
from quant.hf_config import quantized_config, spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from rollout.sglang.servers import ServerLaunch, embedded_command, sglang_command


def stage_functions(config: RunConfig, console: Console, ray_address: str | None) -> StageFunctions:
    """The functions of the five stages; the first that uses Ray starts it."""

    def make(config: RunConfig, out: Path) -> None:
        from miles_like.cluster.workers import start_ray
        from miles_like.pipeline.make_checkpoint import make_checkpoint

        start_ray(ray_address)
        make_checkpoint(config, out, console)

    def stage(work: StageFiles) -> Sequence[Mapping[str, Any]]:
        from miles_like.cluster.node_work import on_every_node
        from miles_like.cluster.workers import start_ray

        start_ray(ray_address)
        return on_every_node(work, timeout_s=config.cluster.timeout_s)

    def train(config: RunConfig, run_dir: Path, served: Path, weights: Path, resume: bool) -> None:
        from miles_like.cluster.workers import start_ray
        from miles_like.run.model_plan import model_plan

        start_ray(ray_address)
        if config.servers is None:
            from miles_like.run.supervised import train_supervised

            train_supervised(model_plan(config, run_dir, served, weights), console, resume=resume)
        else:
            from miles_like.run.train import train as train_with_rollout

            train_with_rollout(model_plan(config, run_dir, served, weights), console, resume=resume)

    def sizes(config_json: Path) -> Sizes:
        hf = fetched_config(config.model, config_json)
        check_layout(config.parallel, hf)
        if config.servers is not None:
            check_engine(config.servers, config.precision, hf)
        _resolved(config, config_json)
        fetched, bf16 = _bytes(hf, spec_from_hf(hf))
        return Sizes(fetched=fetched, bf16=bf16, served=_bytes(hf, served_spec(config.precision, hf))[0])

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
        make=make, convert=convert, on_every_node=stage, train=train, sizes=sizes, preflight=preflight
    )


def shut_down() -> None:
    """Stop Ray if a function of `stage_functions` started it."""
    workers = sys.modules.get("miles_like.cluster.workers")  # not imported unless a stage needed it
    if workers is not None:
        workers.stop_ray()


def fetched_config(model: ModelConfig, config_json: Path) -> dict[str, Any]:
    """The config.json that the fetched checkpoint will have; for a model that is made, with the format of
    `model.make`."""
    hf = read_config_file(config_json)
    return hf if model.make is None else quantized_config(hf, model.make.spec())


def shapes_bytes(config_json: Path, spec: QuantSpec | None = None) -> tuple[int, int]:
    """(bytes as stored, bytes in BF16) of a model with this config.json, from the family's table; nothing is loaded.

    spec: the stored format; by default config.json's. Raises ValueError for a shape that the format does not support.
    """
    hf = read_config_file(config_json)
    return _bytes(hf, spec or spec_from_hf(hf))


def _bytes(hf: Mapping[str, Any], spec: QuantSpec | None) -> tuple[int, int]:
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


def describe_trainer(config: RunConfig) -> str:
    """The kernels of the trainer's ranks, in one line, assuming that GPU ranks have TransformerEngine.

    Raises ValueError for settings that the model, layout or device does not support.
    """
    path = known_config(config.model)
    if path is None:
        return "kernels: checked once the model is fetched"
    trainer, resolved = _resolved(config, path)
    if resolved.forward == "stock":
        return describe_kernels(trainer, resolved.spec)
    variables = [f"{name}={values[0]}" for name, values in environment(resolved.forward).items()]
    return ", ".join([describe_kernels(trainer, resolved.spec), f"{resolved.forward} forward", *variables])


def _resolved(config: RunConfig, config_json: Path) -> tuple[TrainerConfig, Resolved]:
    """Each trainer rank's configuration, resolved. Raises ValueError for settings that the model, layout or device does
    not support."""
    cuda = config.cluster.gpus_per_node > 0
    trainer, hf = trainer_config(config, config_json.parent), fetched_config(config.model, config_json)
    hf = served_config(config.precision, hf)
    if (critic := critic_config(config, trainer)) is not None:
        resolve(critic, with_scalar_head(hf), cuda=cuda, te=cuda)
    return trainer, resolve(trainer, hf, cuda=cuda, te=cuda)


def describe_processes(config: RunConfig, run_dir: Path) -> list[str]:
    """Nodes, ranks and server command lines, as `--dry-run` prints them."""
    plan = plan_placement(config.cluster, config.parallel, config.servers)
    p = config.parallel
    lines = [
        f"layout: TP{p.tp} x PP{p.pp} x CP{p.cp} x DP{p.dp}, EP{p.ep} x ETP{p.etp} over the same {p.world_size} ranks"
    ]
    lines.append(describe_trainer(config))
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
    model = (Path(stage) / "stage-..." if stage else cache_of(config, run_dir) / "stage-..." / "data") / "hf"
    launch = ServerLaunch(
        model_path=model,
        config=config.rollout,
        log_dir=run_dir / "logs",
        activations=config.precision.activations,
        exact=config.tp_shards,
        bucket_bytes=config.publish.bucket_bytes,
        return_routed_experts=_has_experts(config),
    )
    for s in plan.of("rollout"):
        port = (config.rollout.port or 30000) + s.index
        if config.rollout.engine == "embedded":
            command = embedded_command(launch, port)
        else:
            head = next(x for x in plan.of("rollout") if x.index == s.index and x.node_rank == 0)
            address = f"NODE{head.node}:{20000 + s.index}" if s.nnodes > 1 else None
            part = replace(launch, host=f"NODE{s.node}", node_rank=s.node_rank, nnodes=s.nnodes, dist_init_addr=address)
            command = sglang_command(part, port)
        lines.append(f"node {s.node} runs: {' '.join(command)}")
    return [*lines, *config.distillation.described()]


def _has_experts(config: RunConfig) -> bool:
    """Whether the model has experts; true for a model whose config.json is not known yet."""
    path = known_config(config.model)
    if path is None:
        return True
    hf = read_config_file(path)
    return bool(family_of(hf).moe_layers(hf))


def staged(config: RunConfig, run_dir: Path, console: Console, ray_address: str | None) -> Path:
    """The directory of the job's checkpoint, made if it does not exist, with the folders `hf` (for servers) and
    `megatron`."""
    functions = stage_functions(config, console, ray_address)
    *before, _ = plan_stages(config, run_dir, functions, mode="fresh")
    return run_stages(before, [s.name for s in before], console, fresh=False)["stage"].root


def verify(
    config: RunConfig,
    run_dir: Path,
    console: Console,
    ray_address: str | None,
    *,
    key_file: Path | None = None,
    rollouts: Path | None = None,
    checkpoint: Path | None = None,
    attached: Sequence[str] = (),
    overwrite: bool = False,
    prompts: int | None = None,
) -> tuple[AlignmentReport, list[Path]]:
    """Start both sides on the job's checkpoint, made if it does not exist, and compare them; plots are written to
    `run_dir`/verify. key_file: of attached servers. For the other options see `VerifyRun`. Raises ValueError or
    RuntimeError."""
    from rollout.server_key import given_key

    key = given_key(key_file)
    root = staged(config, run_dir, console, ray_address)
    from miles_like.cluster.workers import start_ray
    from miles_like.run.model_plan import model_plan
    from miles_like.run.rollout_side import RolloutSide
    from miles_like.run.verify import VerifyRun
    from miles_like.verify.plots import write_plots

    run_dir.mkdir(parents=True, exist_ok=True)
    plan = model_plan(config, run_dir, root / "hf", root / "megatron")
    run = VerifyRun(
        RolloutSide(plan=plan),
        key=key,
        rollouts=rollouts,
        checkpoint=checkpoint,
        attached=attached,
        overwrite=overwrite,
        prompts=prompts,
    )
    run_to_end(run.meet())
    start_ray(ray_address)
    found = run.report()
    return found, write_plots(found, run_dir / "verify")
