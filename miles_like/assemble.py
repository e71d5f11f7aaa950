"""The composition root: what the pipeline and the command line are made of, by their concrete names.

The heavy libraries (Ray, transformers, datasets, matplotlib, torch's checkpoint writer) are imported by what uses them,
so that a dry run, a finished stage or a mistyped key does not wait for them.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_bridge.config import ParallelConfig, TrainerConfig
from megatron_bridge.convert.units import Spread
from megatron_bridge.deterministic import environment
from megatron_bridge.families.registry import family_of, with_scalar_head
from megatron_bridge.kernels import describe_kernels
from megatron_bridge.layout import check_layout
from megatron_bridge.precision import served_spec
from megatron_bridge.resolve import Resolved, resolve
from miles_like.completion import marker_root, read_marker
from miles_like.config import ModelConfig, RunConfig
from miles_like.dequantize import dequantize_checkpoint
from miles_like.engine_fit import check_engine
from miles_like.hf_checkpoint import check_counts
from miles_like.pipeline import Parts, Preflight, Sizes, Stage, cache_of, known_config, plan_stages, run_stages
from miles_like.placement import plan_placement
from miles_like.quant_report import QuantReport
from miles_like.quantize import quantize_checkpoint, spec_of
from miles_like.rank_configs import critic_config, trainer_config
from miles_like.regular_files import read_json
from miles_like.served import served_config
from miles_like.stopping import run_to_end
from miles_like.verify.findings import Report as AlignmentReport
from quant.hf_config import quantized_config, spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from rollout.servers import embedded_command, sglang_command


def pipeline_parts(config: RunConfig, console: Console, ray_address: str | None) -> Parts:
    """What the five stages need; Ray is started by the first stage that uses it."""

    def make(config: RunConfig, out: Path) -> None:
        from miles_like.make_checkpoint import make_checkpoint
        from miles_like.workers import start_ray

        start_ray(ray_address)
        make_checkpoint(config, out, console)

    def stage(work: Any) -> Sequence[Mapping[str, Any]]:
        from miles_like.node_work import on_every_node
        from miles_like.workers import start_ray

        start_ray(ray_address)
        return on_every_node(work, timeout_s=config.cluster.timeout_s)

    def train(config: RunConfig, run_dir: Path, served: Path, weights: Path, resume: bool) -> None:
        from miles_like.workers import start_ray

        start_ray(ray_address)
        if config.servers is None:
            from miles_like.supervised_stage import SupervisedStage

            SupervisedStage(config, run_dir, served, weights, console).run(resume)
        else:
            from miles_like.train_stage import TrainStage

            TrainStage(config, run_dir, served, weights, console).run(resume)

    def sizes(config_json: Path) -> Sizes:
        hf = fetched_config(config.model, config_json)
        check_layout(config.parallel, hf)  # before anything is fetched or made
        if config.servers is not None:
            check_engine(config.servers, config.precision, hf)
        _resolved(config, config_json)
        fetched, bf16 = _bytes(hf, spec_from_hf(hf))
        return Sizes(fetched=fetched, bf16=bf16, served=_bytes(hf, served_spec(config.precision, hf))[0])

    def convert(hf_dir: Path, out: Path) -> None:
        c, p = config.convert, config.parallel
        cluster = ray_address if config.cluster.nodes > 1 else None
        work = ConvertWork(int(c.memory_limit_gib * (1 << 30)), c.workers, cluster, config.cluster.timeout_s)
        to_megatron(hf_dir, out, work, tp=p.tp, pp=p.pp, ep=p.ep, etp=p.etp)

    def preflight(stages: Sequence[Stage], to_do: Sequence[str], online: bool) -> Preflight:
        from miles_like.preflight import Preflight

        return Preflight(config, stages, to_do, ray_address, online=online)

    return Parts(make=make, convert=convert, on_every_node=stage, train=train, sizes=sizes, preflight=preflight)


def shut_down() -> None:
    """End what `pipeline_parts` started in this process."""
    workers = sys.modules.get("miles_like.workers")  # unless a stage needed it, Ray was never imported
    if workers is not None:
        workers.stop_ray()


CONFIG_BYTES = 4 << 20  # of config.json, the most that is read


def _read_config(config_json: Path) -> dict[str, Any]:
    try:
        hf: dict[str, Any] = read_json(config_json, CONFIG_BYTES)
    except OSError as e:
        raise ValueError(f"{config_json}: {e.strerror}") from None
    except ValueError as e:
        raise ValueError(f"{config_json} is not JSON: {e}") from None
    if not isinstance(hf, dict):
        raise ValueError(f"{config_json} is not a JSON object: fetch the model's again")
    check_counts(hf, config_json)  # before a table of tensors is made of them
    return hf


def fetched_config(model: ModelConfig, config_json: Path) -> dict[str, Any]:
    """The config.json that the fetched checkpoint will have: one that is made is stored as `model.make` says."""
    hf = _read_config(config_json)
    return hf if model.make is None else quantized_config(hf, model.make.spec())


def shapes_bytes(config_json: Path, spec: QuantSpec | None = None) -> tuple[int, int]:
    """Bytes of a model of this config.json, (as stored, in BF16), from the family's table; nothing is loaded.

    Stored as `spec` says, else as config.json does. Raises ValueError for a shape it cannot hold.
    """
    hf = _read_config(config_json)
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
    """The kernels of the trainer's ranks, in one line; GPU ranks are taken to have TransformerEngine.

    Raises ValueError for what this model, layout or device cannot use.
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
    """Each trainer rank's configuration, and what it builds. Raises ValueError where it cannot."""
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
    for s in plan.of("rollout"):
        port = (config.rollout.port or 30000) + s.index
        if config.rollout.engine == "embedded":
            command = embedded_command(
                model,
                config.rollout,
                port=port,
                activations=config.precision.activations,
                exact=config.exact_parts,
                bucket_bytes=config.publish.bucket_bytes,
                return_routed_experts=_has_experts(config),
            )
        else:
            head = next(x for x in plan.of("rollout") if x.index == s.index and x.node_rank == 0)
            address = f"NODE{head.node}:{20000 + s.index}" if s.nnodes > 1 else None
            command = sglang_command(
                config.rollout,
                model,
                port=port,
                host=f"NODE{s.node}",
                node_rank=s.node_rank,
                nnodes=s.nnodes,
                dist_init_addr=address,
                return_routed_experts=_has_experts(config),
            )
        lines.append(f"node {s.node} runs: {' '.join(command)}")
    return [*lines, *config.distillation.described()]


def _has_experts(config: RunConfig) -> bool:
    """True too where the model is not known yet."""
    path = known_config(config.model)
    if path is None:
        return True
    hf = _read_config(path)
    return bool(family_of(hf).moe_layers(hf))


# single steps of the command line


def dequantize(hf_dir: Path, out_dir: Path) -> int:
    return dequantize_checkpoint(hf_dir, out_dir)


def quantize(hf_dir: Path, out_dir: Path, console: Console, *, report: bool = False, **how: Any) -> int:
    """Unquantized directory -> quantized directory; returns bytes. `how`: the words of `spec_of`."""
    spec = spec_of(**how)
    found = QuantReport(spec) if report else None
    written = quantize_checkpoint(hf_dir, out_dir, spec, report=found)
    if found is not None:
        console.print(found.table())
    return written


@dataclass(frozen=True, slots=True)
class ConvertWork:
    """Who converts, and in how much memory."""

    memory_limit: int  # bytes, of all processes of one machine
    workers: int  # processes on each machine
    ray_address: str | None  # a cluster whose nodes share the work; None: this machine alone
    timeout_s: float = 1800.0  # after which a process of a cluster's nodes that has finished nothing is given up

    def spread(self) -> Spread | None:
        if self.ray_address is None:
            return None
        from miles_like.node_work import over_nodes
        from miles_like.workers import start_ray

        start_ray(self.ray_address)
        return partial(over_nodes, each=self.workers, timeout_s=self.timeout_s)


def to_megatron(
    hf_dir: Path, out_dir: Path, work: ConvertWork, *, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1
) -> str:
    """Convert, and say in one line what was done. Raises ValueError for a layout that the model does not fit; stages
    are not cut, so that `pp` need not divide the layers."""
    from megatron_bridge.convert.to_megatron import to_megatron

    dp = ep * etp // math.gcd(ep * etp, tp)  # the least that such experts need
    hf = _read_config(hf_dir / "config.json")
    check_layout(ParallelConfig(tp=tp, ep=ep, etp=etp, dp=dp), hf)
    if pp > (layers := family_of(hf).num_layers(hf)):
        raise ValueError(f"--pp {pp}: the model has {layers} layers, a stage needs at least one; choose fewer stages")
    began = time.monotonic()
    report = to_megatron(
        hf_dir.resolve(),  # other nodes have other working directories
        out_dir.resolve(),
        memory_limit=work.memory_limit,
        workers=work.workers,
        spread=work.spread(),
        tp=tp,
        etp=etp,
    )
    return _converted(report, out_dir, time.monotonic() - began)


def to_hf(megatron_dir: Path, out_dir: Path, work: ConvertWork, **how: Any) -> str:
    """Convert, and say in one line what was done. `how`: format, hf_config and lora_alpha of the conversion."""
    from megatron_bridge.convert.to_hf import to_hf

    began = time.monotonic()
    report = to_hf(
        megatron_dir.resolve(),
        out_dir.resolve(),
        **how,
        memory_limit=work.memory_limit,
        workers=work.workers,
        spread=work.spread(),
    )
    return _converted(report, out_dir, time.monotonic() - began)


def _converted(report: Any, out: Path, seconds: float) -> str:
    kept = f", {report.units_kept} of {report.units} parts kept from an interrupted run" if report.units_kept else ""
    rate = report.bytes / seconds / 1e9
    less = f"; left out: {len(report.skipped)} tensors, first {report.skipped[0]}" if report.skipped else ""
    return (
        f"{report.tensors:,} tensors, {report.bytes:,} bytes -> {out} in {seconds:.1f} s ({rate:.2f} GB/s{kept}){less}"
    )


def check(directory: Path, *, memory_limit: int, workers: int) -> str:
    """Verify, and say in one line what was. Raises ValueError naming the first tensor or file that differs."""
    from megatron_bridge.convert.check import check

    report = check(directory, memory_limit=memory_limit, workers=workers)
    return f"{directory} is whole: {report.tensors:,} tensors, {report.files:,} files, {report.bytes:,} bytes"


def serve(
    hf_dir: Path, *, host: str, port: int, threads: int, key_file: Path | None, routed_experts: bool = True
) -> None:
    """Blocks until the server is told to stop. Raises ValueError when it cannot start."""
    from rollout.embedded import server
    from rollout.server_key import given_key

    arguments = ["--model-path", str(hf_dir), "--host", host, "--port", str(port), "--threads", str(threads)]
    arguments += ["--enable-return-routed-experts"] if routed_experts else []
    server.serve(server.parse(arguments), given_key(key_file))


def report(run_dir: Path) -> Path:
    from miles_like.report import write_report

    write_report(run_dir)
    return run_dir / "report.html"


def staged(config: RunConfig, run_dir: Path, console: Console, ray_address: str | None) -> Path:
    """The job's checkpoint, made if it is not there: its folders `hf`, which servers load, and `megatron`."""
    parts = pipeline_parts(config, console, ray_address)
    *before, _ = plan_stages(config, run_dir, parts, mode="fresh")
    run_stages(before, [s.name for s in before], console, fresh=False)
    marker = read_marker(before[-1].directory)
    assert marker is not None, "staged just now"
    return marker_root(before[-1].directory, marker)


def verify(
    config: RunConfig,
    run_dir: Path,
    console: Console,
    ray_address: str | None,
    *,
    key_file: Path | None = None,
    **how: Any,
) -> tuple[AlignmentReport, list[Path]]:
    """Start both sides on the job's checkpoint, made if it is not there, and compare them; the pictures go into
    `run_dir`/verify. key_file: of attached servers. `how`: the words of `VerifyStage`. Raises ValueError or
    RuntimeError."""
    from rollout.server_key import given_key

    key = given_key(key_file)
    root = staged(config, run_dir, console, ray_address)
    from miles_like.run_parts import RunParts
    from miles_like.verify.pictures import write_pictures
    from miles_like.verify_stage import VerifyStage
    from miles_like.workers import start_ray

    run_dir.mkdir(parents=True, exist_ok=True)
    stage = VerifyStage(RunParts(config, run_dir, root / "hf", root / "megatron", console), key=key, **how)
    run_to_end(stage.meet())
    start_ray(ray_address)
    found = stage.report()
    return found, write_pictures(found, run_dir / "verify")


def evaluate(
    hf_dir: Path,
    run_dir: Path,
    console: Console,
    *,
    config: Path | None,
    overrides: Sequence[str],
    data: Sequence[str],
    server: str | None,
    key_file: Path | None = None,
) -> Any:
    """`eval_alone.Found` of a Hugging Face directory. Raises ValueError or RuntimeError."""
    from miles_like.eval_alone import EvalAlone, read_config
    from rollout.server_key import given_key

    key = given_key(key_file)
    return EvalAlone(hf_dir, read_config(config, overrides, data), run_dir, console, server, key).run()
