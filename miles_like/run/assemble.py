"""The composition root: connects the pipeline's stages and the commands to concrete trainers, servers and clusters.

Slow libraries (Ray, transformers, datasets, matplotlib, torch's checkpoint writer) are imported in the functions that
use them, so that a dry run, a finished stage or a mistyped key does not wait for them.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron_bridge.convert.units import ELSEWHERE
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.deterministic import environment
from megatron_bridge.plan.kernels import describe_kernels
from miles_like.alignment.report import Report as AlignmentReport
from miles_like.check_results import NotCheckedError
from miles_like.cluster.environment import describe_environment
from miles_like.cluster.placement import PlacementPlan, Role, Slot, plan_placement
from miles_like.config.run import RunConfig
from miles_like.config.sections.cluster import format_ranges
from miles_like.config.sections.distillation import MadeServer, StartedServer
from miles_like.device_table import Device, device
from miles_like.hf.checkpoint import read_config, read_config_file
from miles_like.pipeline.cache import cache_of, fetch_directory
from miles_like.pipeline.first_layers import downloaded_bytes, shortened
from miles_like.pipeline.stages import (
    Preflight,
    Sizes,
    Stage,
    StageFunctions,
    plan_stages,
    run_stages,
)
from miles_like.planning.compose import IMBALANCE, plan_run
from miles_like.planning.nearby import Model, nearest, refusal
from miles_like.planning.plan import Plan
from miles_like.preflight.disk_plan import disk_plan
from miles_like.run.setup.model_plan import PlannedModel, model_plan, planned_model
from miles_like.run.setup.rollout_side import (
    RolloutSide,
    server_launch,
    server_variables,
    teacher_launch,
    teacher_model,
)
from miles_like.run.setup.run_cluster import RunCluster, on_every_node
from miles_like.staging.stage_files import node_needs
from miles_like.stopping import run_to_end
from miles_like.storage.fencing import Fence
from miles_like.storage.verified_copy import StageFiles
from quant.hf_config import quantized_config
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from rollout.sglang.ports import BLOCK, DIST_INIT_PORT, HTTP_PORT
from rollout.sglang.servers import ServerLaunch, embedded_command, sglang_command
from rollout.vllm_command import OPEN, vllm_command

if TYPE_CHECKING:
    from miles_like.run.verify import VerifyOptions


SEPARATE: tuple[Role, ...] = ("critic", "reference")  # roles whose ranks have a separate pool, or do not exist


def stage_functions(
    config: RunConfig, model: PlannedModel | None, console: Console, cluster: RunCluster, *, force: bool = False
) -> StageFunctions:
    """The functions of the five stages; the first that uses Ray starts it and chooses the nodes of all. model: None:
    known once it is fetched. force: also a run that does not fit the memory of its devices."""

    def make(config: RunConfig, out: Path) -> None:
        from miles_like.pipeline.make_checkpoint import make_checkpoint

        cluster.join()
        make_checkpoint(config, out, console, cluster.nodes)

    def stage(works: Sequence[StageFiles]) -> Sequence[Mapping[str, Any]]:
        from miles_like.staging.separate_disks import stage_on_nodes

        return stage_on_nodes(works, cluster.hosts(), timeout_s=config.cluster.timeout_s)

    def train(config: RunConfig, run_dir: Path, served: Path, weights: Path, resume: bool, fence: Fence) -> None:
        from miles_like.run.setup.launcher import Launcher

        launcher, plan = Launcher(cluster), model_plan(config, run_dir, served, weights, fence)
        if config.servers is None:
            from miles_like.run.supervised import train_supervised

            train_supervised(plan, console, resume=resume, launcher=launcher)
        else:
            from miles_like.run.train import train as train_with_rollout

            train_with_rollout(plan, console, resume=resume, launcher=launcher)

    def convert(hf_dir: Path, out: Path) -> None:
        from miles_like.pipeline.convert import ConvertWork, to_megatron

        c, p = config.convert, config.parallel
        several = cluster.ray_address is not None and config.cluster.nodes > 1
        nodes = cluster.hosts if several else None
        local = None if config.cluster.stage_dir is None else Path(config.cluster.stage_dir)
        memory, timeout_s = int(c.memory_limit_gib * (1 << 30)), config.cluster.timeout_s
        work = ConvertWork(memory, c.workers, nodes, timeout_s, apart=True, local=local)
        to_megatron(hf_dir, out, work, tp=p.tp, pp=p.pp, ep=p.ep, etp=p.etp)

    def preflight(stages: Sequence[Stage], to_do: Sequence[str], online: bool) -> Preflight:
        from miles_like.preflight.checks import Preflight

        memory = partial(_check_memory, config, model, stages, force=force)
        return Preflight(config, stages, to_do, cluster, online=online, memory=memory)

    return StageFunctions(
        make=make,
        convert=convert,
        on_nodes=stage,
        train=train,
        sizes=None if model is None else _sizes(config, model),
        joins_cluster=cluster.ray_address is not None,
        lost=partial(_lost, cluster, config.cluster.timeout_s),
        preflight=preflight,
    )


def _lost(cluster: RunCluster, timeout_s: float, root: Path) -> Sequence[str]:
    """The files of a converted directory that no node of the run has any more."""
    if not (root / ELSEWHERE).is_file():
        return ()
    from miles_like.staging.separate_disks import lost_pieces

    cluster.join()
    return lost_pieces(root, timeout_s=timeout_s)


def _check_memory(
    config: RunConfig, model: PlannedModel | None, stages: Sequence[Stage], root: Path | None, *, force: bool
) -> None:
    """Raises ValueError for a run that does not fit its devices or nodes, once: where the model is known before it is
    fetched, then."""
    if force or not config.cluster.gpus_per_node or (model is not None and root is not None):
        return
    if model is None:
        if root is None:
            raise NotCheckedError("the model's config.json is not fetched yet")
        model = planned_model(config, read_config(root), root)
    plan = memory_plan(config, model, stages)
    if not plan.fits:
        raise ValueError(memory_refusal(config, model, plan))


def memory_plan(
    config: RunConfig,
    model: PlannedModel,
    stages: Sequence[Stage] = (),
    *,
    on: Device | None = None,
    imbalance: float = IMBALANCE,
) -> Plan:
    """stages: all planned stages, for the disk. on: None: cluster.device."""
    gpu = on or device(config.cluster.device)
    return plan_run(config, model.hf, on=gpu, disk=disk_plan(config, stages, gpu), imbalance=imbalance)


def memory_refusal(config: RunConfig, model: PlannedModel, plan: Plan) -> str:
    """One sentence about a plan that does not fit, with similar layouts on the same GPUs that fit."""

    def plan_of(other: RunConfig) -> Plan:
        return memory_plan(other, planned_model(other, model.hf, Path()), on=plan.device, imbalance=plan.imbalance)

    family, hf = model.family, model.hf
    found = nearest(config, plan, Model(family.num_layers(hf), family.num_experts(hf)), plan_of)
    return refusal(plan, found)


def describe_memory(config: RunConfig, model: PlannedModel | None) -> list[str]:
    """The verdict of the memory plan in one line; none for a run on CPU, or before the model is known."""
    if model is None or not config.cluster.gpus_per_node:
        return []
    return [f"memory: {memory_plan(config, model).verdict()}"]


def shut_down() -> None:
    """Stop Ray if a function of `stage_functions` started it."""
    session = sys.modules.get("miles_like.nodes.session")  # not imported unless a stage needed it
    if session is not None:
        session.stop_ray()


def known_model(config: RunConfig) -> PlannedModel | None:
    """The plan of the model, from a config.json that exists before anything is fetched; None where there is none. For a
    model that is made, with the format of `model.make`. Raises ValueError as `planned_model`."""
    given, make = config.model, config.model.make
    if (path := _config_file(config)) is None:
        return None
    hf = read_config_file(path)
    if given.first_layers is not None:
        hf = shortened(hf, given.first_layers)
    return planned_model(config, hf if make is None else quantized_config(hf, make.spec()), path.parent)


def _config_file(config: RunConfig) -> Path | None:
    """The config.json that exists before anything is fetched; None where there is none."""
    given, make = config.model, config.model.make
    path = Path(make.config if make is not None else given.config or given.path)
    if make is None and given.config is None and not path.is_dir():
        return None
    return path / "config.json" if path.is_dir() else path


def _sizes(config: RunConfig, model: PlannedModel) -> Sizes:
    fetched, bf16 = checkpoint_bytes(model.hf, model.stored)
    served = checkpoint_bytes(model.hf, model.spec)[0]
    needs = node_needs(config, model.hf, served)
    path, layers = _config_file(config), config.model.first_layers
    downloaded = 0
    if path is not None and layers is not None and not Path(config.model.path).is_dir():
        whole = read_config_file(path)
        downloaded = downloaded_bytes(whole, layers, fetched, checkpoint_bytes(whole, model.stored)[0])
    return Sizes(fetched=fetched, bf16=bf16, served=served, nodes=needs, downloaded=downloaded)


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


def describe_processes(config: RunConfig, run_dir: Path, model: PlannedModel | None, stage: Path) -> list[str]:
    """Nodes, ranks and server command lines, as `--dry-run` prints them. model: None: not known yet. stage: the
    directory of the stage of that name."""
    plan = plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts)
    lines = ["kernels: checked once the model is fetched" if model is None else _describe_trainer(model)]
    lines += describe_placement(config, plan)
    local = config.cluster.stage_dir
    served = (Path(local) / stage.name if local else stage / "data") / "hf"
    routes = model is None or model.routing is not None
    logs = run_dir / "logs"
    launches = [(s, server_launch(config, served, logs, s, routes=routes)) for s in plan.of("rollout")]
    lines += describe_servers("rollout server", [_server_command(plan, s, launch) for s, launch in launches])
    paths = _teacher_paths(config, run_dir)
    launches = [(s, teacher_launch(config, paths[s.index], logs / "teachers", s)) for s in plan.of("teachers")]
    lines += describe_servers("server of a teacher", [_server_command(plan, s, launch) for s, launch in launches])
    if config.takes_turns:
        lines.append(TURN)
    if config.servers is not None and config.rollout.engine == "vllm":
        lines.append(OPEN)
    return [*lines, *_describe_environments(config), *config.distillation.described()]


def describe_servers(title: str, commands: Sequence[list[str]]) -> list[str]:
    """Two lines for commands that differ in `_DIFFERENT` only: their number and what differs, then the first command
    on a line without other words."""
    groups: dict[tuple[str, ...], list[list[str]]] = {}
    for command in commands:
        masked = ["" if before in _DIFFERENT else word for before, word in zip(["", *command], command, strict=False)]
        groups.setdefault(tuple(masked), []).append(command)
    lines = []
    for alike in groups.values():
        first = alike[0]
        differ = [
            f"{first[i - 1]} {_first_and_last([command[i] for command in alike])}"
            for i in range(1, len(first))
            if len({command[i] for command in alike}) > 1
        ]
        number = f"{len(alike)} x, {', '.join(differ)}" if differ else f"{len(alike)} x"
        lines += [f"{title}: {number}", " ".join(word if "$" in word else shlex.quote(word) for word in first)]
    if any("$NODE" in word for command in commands for word in command):
        lines.append("$NODE0 is the address of node 0")
    return lines


_DIFFERENT = ("--port", "--host", "--dist-init-addr")


def _first_and_last(values: Sequence[str]) -> str:
    return ", ".join(values) if len(values) < 4 else f"{values[0]}, {values[1]}, ..., {values[-1]}"


def _teacher_paths(config: RunConfig, run_dir: Path) -> list[Path]:
    """The checkpoint of each teachers' server, by its number: a local one as it is named, or the cache's."""

    def path(name: str, teacher: StartedServer | MadeServer) -> Path:
        if isinstance(teacher, StartedServer) and Path(teacher.path).is_dir():
            return Path(teacher.path)
        of = config.model_copy(
            update={"model": teacher_model(name, teacher.path if isinstance(teacher, StartedServer) else teacher.make)}
        )
        return fetch_directory(of, cache_of(config, run_dir))[1] / "data"

    return [path(name, teacher) for name, teacher in config.distillation.started.items()]


def _server_command(plan: PlacementPlan, slot: Slot, launch: ServerLaunch) -> list[str]:
    """`$NODE3` stands for the address of node 3. Ports are those on a cluster; 0 stands for any free one."""
    config, number = launch.config, plan.ports_of(slot.role).first + slot.index
    host = f"$NODE{slot.node}" if plan.nodes > 1 else "127.0.0.1"
    port = (config.port or HTTP_PORT) + number
    if config.engine == "embedded":
        return embedded_command(launch, 0 if slot.role == "teachers" else port)
    if config.engine == "vllm":
        routes = launch.return_routed_experts
        return vllm_command(config.vllm, model_path=launch.model_path, host=host, port=port, routes=routes)
    head = next(s for s in plan.of(slot.role) if s.index == slot.index and s.node_rank == 0)
    dist_init = (config.sglang.dist_init_port or DIST_INIT_PORT) + BLOCK * number
    address = f"{f'$NODE{head.node}' if slot.nnodes > 1 else '127.0.0.1'}:{dist_init}"
    return sglang_command(replace(launch, host=host, dist_init_addr=address), port)


def _describe_environments(config: RunConfig) -> list[str]:
    """The environment variables that each kind of process gets beside those of its node's Ray, one line a kind."""
    roles: dict[Role, tuple[str, Mapping[str, str]]] = {"trainer": ("a trainer rank", config.cluster.env)}
    if config.algorithm.has_critic:
        roles["critic"] = ("a critic rank", config.cluster.env)
    if config.cluster.pools.reference is not None:
        roles["reference"] = ("a reference rank", config.cluster.env)
    if config.servers is not None:
        roles["rollout"] = ("a rollout server", server_variables(config))
        plan = plan_placement(config.cluster, config.parallel, config.servers, config.teacher_rollouts)
        if plan.of("teachers"):
            roles["teachers"] = ("a server of a teacher", config.rollout.env)
    gpus, stage_dir = config.cluster.gpus_per_node, config.cluster.stage_dir
    lines = []
    for role, (title, env) in roles.items():
        found = describe_environment(role, env=env, gpus_per_node=gpus, stage_dir=stage_dir)
        lines.append(f"environment of {title}: {' '.join(f'{name}={shown}' for name, shown in found.items())}")
    return lines


def describe_placement(config: RunConfig, plan: PlacementPlan) -> list[str]:
    """One line about the GPUs that trainer and servers share, then one line for each node. Nodes are numbered in the
    order of the run."""
    both, used = plan.shared_gpus, {(s.node, gpu) for s in plan.slots for gpu in s.gpus}
    lines = [f"GPUs: {len(used)} used, {len(both)} of them by trainer and rollout in turns"] if used else []
    beside = config.algorithm.has_critic and not plan.of("critic")
    for node in range(plan.nodes):
        trainer = _describe_ranks("trainer", plan, node) or "no trainer rank"
        if beside and _describe_ranks("trainer", plan, node):
            trainer += ", a rank of the critic beside each"
        others = [text for role in SEPARATE if (text := _describe_ranks(role, plan, node))]
        servers = [
            (str(s.index) if s.nnodes == 1 else f"{s.index} (part {s.node_rank + 1} of {s.nnodes})") + _on_gpus(s.gpus)
            for s in plan.of("rollout")
            if s.node == node
        ]
        on_node = [f"{s.index}{_on_gpus(s.gpus)}" for s in plan.of("teachers") if s.node == node]
        others += [f"server of teacher {', '.join(on_node)}"] if on_node else []
        rest = "".join(f"; {text}" for text in others)
        lines.append(f"node {node}: {trainer}; rollout server {', '.join(servers) or 'none'}{rest}")
    return lines


def _describe_ranks(role: Role, plan: PlacementPlan, node: int) -> str:
    """Empty where the node has none."""
    slots = [s for s in plan.of(role) if s.node == node]
    gpus = tuple(sorted(gpu for s in slots for gpu in s.gpus))
    return f"{role} ranks {slots[0].index}-{slots[-1].index}{_on_gpus(gpus)}" if slots else ""


def _on_gpus(gpus: tuple[int, ...]) -> str:
    return f" on GPU {format_ranges(gpus)}" if gpus else ""


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
    run_dir = on_every_node(run_dir, ray_address)
    cluster = RunCluster(config, run_dir, console, ray_address)
    try:
        return _staged(config, run_dir, console, cluster)
    finally:
        cluster.release()


def _staged(config: RunConfig, run_dir: Path, console: Console, cluster: RunCluster) -> Path:
    functions = stage_functions(config, known_model(config), console, cluster)
    *before, _ = plan_stages(config, run_dir, functions, mode="fresh")
    return run_stages(before, [s.name for s in before], console, fresh=False)["stage"].root


def verify(
    config: RunConfig, run_dir: Path, console: Console, ray_address: str | None, options: VerifyOptions
) -> tuple[AlignmentReport, list[Path]]:
    """Start both sides on the job's checkpoint, made if it does not exist, and compare them; plots are written to
    `run_dir`/verify. Raises ValueError or RuntimeError."""
    run_dir = on_every_node(run_dir, ray_address)
    cluster = RunCluster(config, run_dir, console, ray_address)
    cluster.nodes()  # before staging, which is then done on the nodes that both sides start on
    root = _staged(config, run_dir, console, cluster)
    from miles_like.alignment.plots import write_plots
    from miles_like.run.setup.launcher import Launcher
    from miles_like.run.verify import VerifyRun

    run_dir.mkdir(parents=True, exist_ok=True)
    plan = model_plan(config, run_dir, root / "hf", root / "megatron")
    run = VerifyRun(RolloutSide(plan=plan), options, launcher=Launcher(cluster))
    run_to_end(run.meet())
    found = run.report()
    return found, write_plots(found, run_dir / "verify")
