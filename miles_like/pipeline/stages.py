"""The five stages: fetch, dequantize, convert, stage, train.

Each maps typed inputs to an output directory that gets a completion marker at the end (storage/completion.py). A
stage's key is the hash of its inputs and of the previous stage's key, and names its directory in the cache. A stage
whose marker has that key is skipped, a changed input gives a new directory, and an incomplete directory is redone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from megatron_bridge.convert.directory.manifest import Manifest
from miles_like.check_results import CheckResult, Outcome, describe_remarks, describe_unchecked, raise_failures
from miles_like.checkpoint.run_state import go_back
from miles_like.config.run import RunConfig
from miles_like.config.sections.supervised import PAIRS
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.pipeline.cache import cache_of, fetch_directory
from miles_like.pipeline.dequantize import dequantize_checkpoint, is_unquantized
from miles_like.pipeline.fetch import content, describe, fetch, is_taken_as_it_is, visible_files
from miles_like.pipeline.rollout_checkpoint import served_output
from miles_like.pipeline.run_directory import Mode, check_nothing_lost, check_own, clear_run_dir, summary_files
from miles_like.pipeline.stage_names import STAGES
from miles_like.report.console import counted
from miles_like.staging.stage_files import HF, MEGATRON, NodeNeed, layout_inputs, stage_plan
from miles_like.storage.completion import (
    ABSENT,
    MARKER,
    Output,
    cleared,
    files_under,
    input_key,
    marker_root,
    note_times,
    read_marker,
    why_incomplete,
    write_marker,
)
from miles_like.storage.fencing import Fence
from miles_like.storage.verified_copy import StageFiles, verified_sums

Run = Callable[[Path, Mapping[str, Output]], Path]  # (directory, earlier stages' outputs) -> root of the data
Hashes = Callable[[Path], Mapping[str, tuple[int, str]]]  # root -> (size, SHA-256) of files that the stage hashed
Lost = Callable[[Path], Sequence[str]]  # root -> files of the output that were on other nodes and are on none any more


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One planned stage."""

    name: str
    what: str  # one line for the console
    key: str
    directory: Path  # holds the marker, and the data unless `run` returns another root
    size: int | None  # bytes it will write; None: known once the previous stage has run
    removed: int = 0  # bytes beside them that it writes and removes at its end
    run: Run
    listed: Callable[[Path], list[Path]] = field(default=files_under)  # root -> files that the marker lists
    hashed: Hashes = field(default=lambda _: {})
    again: str | None = None  # why it runs although it is complete
    lost: Lost = field(default=lambda _: ())  # asked before its output is used
    by_node: tuple[NodeNeed, ...] | None = None  # of the stage that copies to the nodes; None: known later

    def why_not_done(self) -> str | None:
        why = why_incomplete(self.directory, self.key) or self.again
        return "new run" if why == ABSENT and self.name == "train" else why


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a checkpoint."""

    fetched: int  # in the stored format
    downloaded: int = 0  # of the files that hold the layers which are fetched, until these are written; 0: none
    bf16: int
    served: int  # in the rollout's format
    nodes: tuple[NodeNeed, ...]  # what each node copies


class Preflight(Protocol):
    """The checks before a run."""

    def run(self) -> Sequence[CheckResult]:
        """Called before the first stage. Raises nothing."""

    def fetched(self, root: Path) -> Sequence[CheckResult]:
        """Called after the fetch stage: the checks that need its output."""


class NoChecks:
    """A `Preflight` without checks."""

    def run(self) -> Sequence[CheckResult]:
        return ()

    def fetched(self, root: Path) -> Sequence[CheckResult]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFunctions:
    """Functions that the stages call, and that depend on a concrete trainer, server or cluster."""

    make: Callable[[RunConfig, Path], None]  # write the checkpoint that `model.make` describes into a directory
    convert: Callable[[Path, Path], None]  # Hugging Face directory -> torch_dist directory
    on_nodes: Callable[[Sequence[StageFiles]], Sequence[Mapping[str, Any]]]  # run the copies of node k on node k
    # (config, run_dir, served HF, weights, resume, epoch of run_dir)
    train: Callable[[RunConfig, Path, Path, Path, bool, Fence], None]
    sizes: Sizes | None  # of the model; None: known once it is fetched
    joins_cluster: bool = False  # whose nodes may be other machines than this one
    lost: Lost = field(default=lambda _: ())  # of the converted directory
    # (all stages, names of those that will run, whether to use network and cluster) -> the checks
    preflight: Callable[[Sequence[Stage], Sequence[str], bool], Preflight] = field(default=lambda *_: NoChecks())


def plan_stages(
    config: RunConfig, run_dir: Path, functions: StageFunctions, *, mode: Mode = "auto", from_step: int | None = None
) -> list[Stage]:
    """All five stages with their keys and directories. Reads configuration files and writes nothing. from_step: the
    checkpoint to resume from, if not the latest."""
    assert from_step is None or mode == "resume", mode
    cache = cache_of(config, run_dir)
    size = functions.sizes
    bf16 = None if size is None else size.bf16
    key, directory = fetch_directory(config, cache)
    stages = [
        Stage(
            name="fetch",
            what=describe(config.model),
            key=key,
            directory=directory,
            size=0 if is_taken_as_it_is(config.model) else None if size is None else size.fetched,
            removed=0 if size is None else size.downloaded,
            run=lambda out, _: fetch(config.model, out, lambda data: functions.make(config, data)),
            listed=visible_files,
        )
    ]

    def add(
        name: str, what: str, size: int | None, run: Run, inputs: Mapping[str, object], hashed: Hashes = lambda _: {}
    ) -> None:
        stages.append(_cached_stage(cache, stages[-1].key, name, what, size, run, inputs, hashed))

    if config.convert.fuse:
        what = "Nothing to do: quantized weights are decoded during the conversion"
        add("dequantize", what, 0, _leave_to_convert, {"fuse": True})
    else:
        add("dequantize", "Decoding quantized weights to BF16 safetensors", bf16, _dequantize, {})
    add(
        "convert",
        "Converting Hugging Face tensors to Megatron torch_dist shards, loadable in any layout",
        bf16,
        lambda out, done: _convert(out, done, functions),
        {"grid": [config.parallel.tp, config.parallel.etp]},  # cut for these ranks
        _converted,
    )
    stages[-1] = replace(stages[-1], lost=functions.lost)
    stages.append(_plan_staging(config, cache, functions, after=stages[-1].key))
    return [*stages, _plan_training(config, run_dir, functions, mode, from_step, after=stages[-1].key)]


def _plan_staging(config: RunConfig, cache: Path, functions: StageFunctions, *, after: str) -> Stage:
    """Its directory is that of the content; with another layout the stage runs again there and copies what is
    missing."""
    precision, size = config.precision, functions.sizes
    inputs = {
        "stage_dir": config.cluster.stage_dir,
        "served": precision.model_dump(mode="json", include={"format", "scope", "block", "convention"}),
    }
    stage = _cached_stage(
        cache,
        after,
        "stage",
        _of_staging(config),
        None if size is None else sum(need.total for need in size.nodes),
        lambda out, done: _stage(config, out, done, functions),
        inputs,
        verified_sums,
    )
    key = input_key("stage", {"after": after, **inputs, "layout": layout_inputs(config)})
    # the marker is of this machine; another run's node k may be another machine, which lacks files
    elsewhere = config.cluster.nodes > 1 or functions.joins_cluster
    again = "each node verifies its copy" if elsewhere else None
    return replace(stage, key=key, by_node=None if size is None else size.nodes, again=again)


def _cached_stage(
    cache: Path,
    after: str,
    name: str,
    what: str,
    size: int | None,
    run: Run,
    inputs: Mapping[str, object],
    hashed: Hashes,
) -> Stage:
    """A stage with a directory in the cache. after: key of the previous stage."""
    key = input_key(name, {"after": after, **inputs})
    return Stage(
        name=name,
        what=what,
        key=key,
        directory=cache / f"{name}-{key}",
        size=size,
        run=run,
        # dequantize may return the fetched directory; not for the others, whose shards have a hidden metadata file
        listed=visible_files if name == "dequantize" else files_under,
        hashed=hashed,
    )


def _plan_training(
    config: RunConfig, run_dir: Path, functions: StageFunctions, mode: Mode, from_step: int | None, *, after: str
) -> Stage:
    train = config.train
    each = f", {train.steps_per_rollout} optimizer steps each" if train.steps_per_rollout > 1 else ""
    return Stage(
        name="train",
        what=f"Training: {counted(train.steps, 'step')} of {train.groups_per_step} {_of_a_step(config)}{each}",
        key=input_key("train", {"after": after, "config": _of_training(config), "data": _data(config)}),
        directory=run_dir,
        size=None,
        run=lambda out, done: _train(config, out, done, functions, mode, from_step),
        listed=summary_files,
        again=None if from_step is None else f"from step {from_step}",
    )


def _of_a_step(config: RunConfig) -> str:
    if config.servers is not None:
        return f"x {config.train.samples_per_group} samples"
    return "pairs" if config.algorithm.name in PAIRS else "examples"


def _of_staging(config: RunConfig) -> str:
    served, nodes = f"the {config.precision.format.upper()} checkpoint and the shards", config.cluster.nodes
    if nodes == 1:
        return f"Copying {served} to 1 node, verified by SHA-256"
    return f"Copying to each of {nodes} nodes the parts that it loads of {served}, verified by SHA-256"


def parse_stages(text: str, *, fuse: bool = False) -> list[str]:
    """`fetch,train` as a list of names. fuse: `convert.fuse`: dequantize is a part of convert, which selects both.
    Raises ValueError for an unknown stage, and for no stage."""
    selected = [s.strip() for s in text.split(",") if s.strip()]
    unknown = [s for s in selected if s not in STAGES]
    if unknown or not selected:
        what = f"unknown stage {unknown[0]!r}" if unknown else "--stages is empty"
        raise ValueError(f"{what}; the stages are {', '.join(STAGES)}")
    return ["dequantize", *selected] if fuse and "convert" in selected and "dequantize" not in selected else selected


def stages_to_do(stages: Sequence[Stage], selected: Sequence[str], *, fresh: bool) -> list[str]:
    """Names of the selected stages that will run."""
    return [s.name for s in stages if s.name in selected and (fresh or s.why_not_done() is not None)]


def run_stages(
    stages: Sequence[Stage],
    selected: Sequence[str],
    console: Console,
    *,
    fresh: bool,
    preflight: Callable[[Sequence[str]], Preflight] = lambda _: NoChecks(),
) -> Mapping[str, Output]:
    """Run the selected stages in order; a complete stage is skipped unless `fresh`. Returns the outputs by stage name.

    preflight: names of the stages that will run -> their checks. Raises ValueError when a stage needs the output of one
    that is neither selected nor complete, and when a check fails, before the first stage (or, for checks of the fetched
    checkpoint, after the fetch stage).
    """
    done: dict[str, Output] = {}
    to_do = stages_to_do(stages, selected, fresh=fresh)
    absent = {s.name for s in stages if s.name not in selected and why_incomplete(s.directory, s.key) is not None}
    for k, stage in enumerate(stages):
        missing = ",".join(s.name for s in stages[:k] if s.name in absent)
        if stage.name in to_do and missing:
            raise ValueError(f"stage {stage.name} needs {missing.replace(',', ', ')}: add {missing} to --stages")
    checks = preflight(to_do)
    _report_checks(checks.run() if to_do else (), console)
    for stage in stages:
        why = stage.why_not_done() or (_lost(stage) if to_do else None)
        if stage.name not in selected:
            if stage.name not in absent:
                done[stage.name] = _output(stage)
            continue
        if why is None and not fresh:
            note_times(stage.directory)
            done[stage.name] = _output(stage)
            console.print(f"[bold]{stage.name:>10}[/]  complete, skipped: {done[stage.name].root}", soft_wrap=True)
        else:
            why = "--fresh" if why is None else why
            console.print(f"[bold]{stage.name:>10}[/]  {stage.what} ({why})", soft_wrap=True)
            with _locked(stage, console), _explain_full_disk(stage):
                if fresh or stage.why_not_done() or _lost(stage):  # another command may have completed it meanwhile
                    _run(stage, done)
            done[stage.name] = _output(stage)
        if stage.name == "fetch":
            _report_checks(checks.fetched(done[stage.name].root) if to_do else (), console)
    return done


def _lost(stage: Stage) -> str | None:
    """Why a complete stage runs again all the same."""
    lost = stage.lost(_output(stage).root)
    return f"{counted(len(lost), 'file')} of it, such as {lost[0]}, on no node any more" if lost else None


def _run(stage: Stage, done: Mapping[str, Output]) -> None:
    root = stage.run(stage.directory, done)
    known = {**_as_left(root, done), **stage.hashed(root)}
    write_marker(stage.directory, stage=stage.name, key=stage.key, root=root, files=stage.listed(root), known=known)


def _report_checks(checks: Sequence[CheckResult], console: Console) -> None:
    """Print the number of passed checks, remarks and what was not checked. Raises ValueError if a check failed."""
    raise_failures(checks)
    passed = sum(c.outcome is Outcome.OK for c in checks)
    if checks:
        console.print(f"[bold]{'checks':>10}[/]  {passed} passed", soft_wrap=True)
    lines = [f"note: {line}" for line in describe_remarks(checks)]
    for line in [*lines, *(f"not checked: {line}" for line in describe_unchecked(checks))]:
        console.print(f"{'':12}{line}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _explain_full_disk(stage: Stage) -> Iterator[None]:
    """Turn any error of a full disk into a ValueError with free and needed bytes."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as e:
        if not _is_disk_full(e):
            raise
        free = shutil.disk_usage(stage.directory.parent).free
        needs = f", the stage needs {stage.size:,}" if stage.size else ""
        raise ValueError(
            f"stage {stage.name}: {' '.join(str(e).split())}; the file system of {stage.directory} has {free:,} bytes "
            f"free{needs}: free some space, or use a directory on a larger disk"
        ) from e


def _is_disk_full(error: BaseException) -> bool:
    """Also by the message, because an error from another process has lost its errno."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.errno == errno.ENOSPC:
            return True
        found = found.__cause__ or found.__context__
    return os.strerror(errno.ENOSPC).lower() in str(error).lower()


@contextlib.contextmanager
def _locked(stage: Stage, console: Console) -> Iterator[None]:
    """Lock the stage's directory against other commands; the kernel releases the lock when the process ends.

    Waits for another command that is making the stage. Raises ValueError for a run directory in use.
    """
    stage.directory.parent.mkdir(parents=True, exist_ok=True)
    with stage.directory.with_name(f".{stage.directory.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if stage.name == "train":
                raise ValueError(
                    f"another command is running in {stage.directory}: use a different --run-dir"
                ) from None
            console.print(f"{'':12}waiting for another command that builds it", soft_wrap=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _converted(root: Path) -> dict[str, tuple[int, str]]:
    """(size, SHA-256) of the converter's files from its manifest, hashed while they were written."""
    files = Manifest.read(root).files if Manifest.there(root) else {}
    return {name: (fact.size, fact.sha256) for name, fact in files.items()}


def _as_left(root: Path, done: Mapping[str, Output]) -> dict[str, tuple[int, str]]:
    """(size, SHA-256) of files that an earlier stage left in the same directory and that are unchanged since, so that a
    stage with nothing to do does not read the checkpoint again."""
    return {
        name: (fact["size"], fact["sha256"])
        for output in done.values()
        if output.root == root.resolve()
        for name, fact in output.files.items()
        if (root / name).is_file() and (root / name).stat().st_mtime_ns == fact["mtime_ns"]
    }


def _output(stage: Stage) -> Output:
    marker = read_marker(stage.directory)
    assert marker is not None, stage.directory
    return Output(marker_root(stage.directory, marker), marker["files"])


# dequantize, convert, stage, train


def _dequantize(out: Path, done: Mapping[str, Output]) -> Path:
    if is_unquantized(HFCheckpoint(done["fetch"].root)):
        out.mkdir(parents=True, exist_ok=True)
        return done["fetch"].root
    data = cleared(out)
    dequantize_checkpoint(done["fetch"].root, data)
    return data


def _leave_to_convert(out: Path, done: Mapping[str, Output]) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    return done["fetch"].root


def _convert(out: Path, done: Mapping[str, Output], functions: StageFunctions) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    data = out / "data"
    shutil.rmtree(data, ignore_errors=True)  # shards without a marker may be incomplete
    functions.convert(done["dequantize"].root, data)
    return data


def _stage(config: RunConfig, out: Path, done: Mapping[str, Output], functions: StageFunctions) -> Path:
    stage_dir = config.cluster.stage_dir
    data = Path(stage_dir) / out.name if stage_dir else out / "data"
    stored = out / "served"  # for another format than the fetched one
    served, shards = served_output(config, done["fetch"], stored), done["convert"]
    plan = stage_plan(config, data, served, shards)
    functions.on_nodes(plan.nodes)
    plan.driver()
    if config.cluster.nodes == 1 and not functions.joins_cluster:  # elsewhere another node may need it
        shutil.rmtree(stored, ignore_errors=True)
    return data


def _train(
    config: RunConfig,
    run_dir: Path,
    done: Mapping[str, Output],
    functions: StageFunctions,
    mode: Mode,
    from_step: int | None,
) -> Path:
    if mode == "auto":
        check_nothing_lost(run_dir)
    if mode != "resume":
        check_own(run_dir)
    fence = Fence.begin(run_dir)  # from here on a process that is left of an earlier start writes nothing
    if mode != "resume":
        clear_run_dir(run_dir)
    if from_step is not None:
        go_back(run_dir / "checkpoints", from_step)
    (run_dir / MARKER).unlink(missing_ok=True)
    served, weights = done["stage"].root / HF, done["stage"].root / MEGATRON
    functions.train(config, run_dir, served, weights, mode == "resume", fence)
    fence.check()
    return run_dir


def _of_training(config: RunConfig) -> dict[str, Any]:
    """The settings that affect training: all but the conversion's and the cache's."""
    return config.model_dump(mode="json", exclude={"convert", "cache_dir"})


def _data(config: RunConfig) -> dict[str, str]:
    paths = {"eval": config.data.eval} | {name: s.path for name, s in config.data.train_sources().items()}
    # an absolute path must be a file; a relative one may be a hub name
    return {k: content(Path(p)) for k, p in paths.items() if p and (Path(p).is_absolute() or Path(p).is_file())}
