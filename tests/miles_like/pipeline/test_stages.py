"""The stages' rules about directories, without trainer, server or cluster: what is redone, kept, refused and removed.

Not covered: what the stages do (tests/e2e), downloads, staging over several nodes (test_staging.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from rich.console import Console

from miles_like.checkpoint import run_state
from miles_like.cli import app
from miles_like.config.load import dump_config
from miles_like.config.run import RunConfig
from miles_like.hf.checkpoint import write_hf
from miles_like.pipeline.run_directory import Mode
from miles_like.pipeline.stage_names import STAGES
from miles_like.pipeline.stages import Sizes, StageFunctions, _as_left, plan_stages, run_stages
from miles_like.run import assemble
from miles_like.staging.stage_files import NodeNeed
from miles_like.stopping import StopRequest
from miles_like.storage import completion
from miles_like.storage.completion import Output, file_sha256
from miles_like.storage.fencing import Fence
from tests.support.cli_runner import CliRunner, Result
from tests.support.refusals import check_refusal, refuses


class Cluster:
    """StageFunctions that write a file each and note what ran."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.break_convert = False
        self.lost: list[str] = []  # files of the converted directory that other nodes held

    def parts(self) -> StageFunctions:
        def convert(source: Path, out: Path) -> None:
            self.ran.append("convert")
            self.lost.clear()
            time.sleep(0.2)  # long enough for another command to come by
            out.mkdir(parents=True)
            (out / "half").write_text("half")
            if self.break_convert:
                raise RuntimeError("killed")
            (out / "whole").write_text("whole")
            (out / ".metadata").write_text("which tensor lies where")  # as torch_dist calls it

        def train(config: RunConfig, run_dir: Path, served: Path, weights: Path, resume: bool, _: Fence) -> None:
            self.ran.append("resume" if resume else "train")
            assert (served / "config.json").is_file() and (weights / "whole").is_file()
            (run_dir / "metrics.jsonl").write_text("{}\n")

        return StageFunctions(
            make=lambda config, out: None,
            convert=convert,
            on_nodes=lambda works: [work() for work in works],
            train=train,
            sizes=Sizes(fetched=1, bf16=1, served=1, nodes=(NodeNeed(served=1, shards=1),)),
            lost=lambda root: tuple(self.lost),
        )


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    write_hf(tmp_path / "model", [("a.weight", torch.ones(2, 2, dtype=torch.bfloat16))], {"model_type": "x"})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    return RunConfig.model_validate({"model": {"path": str(tmp_path / "model")}, "data": {"train": str(prompts)}})


def go(
    cluster: Cluster, config: RunConfig, run_dir: Path, *, stages: str = ",".join(STAGES), mode: Mode = "auto"
) -> str:
    printed = io.StringIO()
    planned = plan_stages(config, run_dir, cluster.parts(), mode=mode)
    run_stages(planned, stages.split(","), Console(file=printed, width=200), fresh=mode == "fresh")
    return printed.getvalue()


def test_what_is_whole_is_skipped_and_what_was_broken_off_is_redone(config: RunConfig, tmp_path: Path) -> None:
    """A stage that raised (or was killed) half-way has no marker, so nothing later takes its files for whole."""
    cluster = Cluster()
    cluster.break_convert = True
    with refuses(RuntimeError, "killed"):
        go(cluster, config, tmp_path / "runs" / "a")
    cluster.break_convert = False
    printed = go(cluster, config, tmp_path / "runs" / "a")
    assert "(incomplete)" in printed and printed.count("complete, skipped") == 2
    assert cluster.ran == ["convert", "convert", "train"]
    assert go(cluster, config, tmp_path / "runs" / "a").count("complete, skipped") == 5


def test_a_conversion_whose_files_were_on_a_lost_node_is_redone(config: RunConfig, tmp_path: Path) -> None:
    """Where a stage that needs it runs; otherwise nothing is asked of the nodes."""
    cluster = Cluster()
    go(cluster, config, tmp_path / "runs" / "a")
    cluster.lost.append("whole")
    go(cluster, config, tmp_path / "runs" / "a")
    assert cluster.ran == ["convert", "train"]
    printed = go(cluster, config, tmp_path / "runs" / "b")
    assert cluster.ran == ["convert", "train", "convert", "train"]
    assert "1 file of it, such as whole, on no node any more" in printed


def test_a_directory_of_other_things_is_never_emptied(config: RunConfig, tmp_path: Path) -> None:
    """A run starts over in an empty directory; one mistyped --run-dir must not cost the user his files."""
    home = tmp_path / "runs" / "home"
    (home / "thesis").mkdir(parents=True)
    (home / "thesis" / "chapter.tex").write_text("years of work")
    for mode in ("auto", "fresh"):
        with refuses(ValueError, "--run-dir"):
            go(Cluster(), config, home, mode=mode)
    assert (home / "thesis" / "chapter.tex").read_text() == "years of work"


def test_fresh_removes_the_run_that_was_there(config: RunConfig, tmp_path: Path) -> None:
    run_dir, cluster = tmp_path / "runs" / "a", Cluster()
    go(cluster, config, run_dir)
    (run_dir / "rollouts").mkdir()
    (run_dir / "rollouts" / "step_7.jsonl").write_text("old")
    go(cluster, config, run_dir, mode="fresh")
    assert cluster.ran == ["convert", "train"] * 2 and not (run_dir / "rollouts").exists()


@pytest.mark.parametrize("left", ["latest", "step_1/run_state.json"])
def test_a_checkpoint_is_not_overwritten_unasked(config: RunConfig, tmp_path: Path, left: str) -> None:
    """A run that was killed before it named its first checkpoint has one all the same."""
    run_dir, cluster = tmp_path / "runs" / "a", Cluster()
    (run_dir / "checkpoints" / "step_1").mkdir(parents=True)
    (run_dir / "checkpoints" / left).write_text("step_1\n")
    with refuses(ValueError, "--resume"):
        go(cluster, config, run_dir)
    go(cluster, config, run_dir, mode="resume")
    assert cluster.ran == ["convert", "resume"] and (run_dir / "checkpoints" / left).exists()


def test_a_subset_runs_alone_or_says_what_it_needs(config: RunConfig, tmp_path: Path) -> None:
    cluster = Cluster()
    with refuses(ValueError, "--stages"):
        go(cluster, config, tmp_path / "runs" / "a", stages="convert")
    go(cluster, config, tmp_path / "runs" / "a", stages="fetch,dequantize")
    go(cluster, config, tmp_path / "runs" / "a", stages="convert")
    assert cluster.ran == ["convert"] and not (tmp_path / "runs" / "a").exists()


def test_fp8_codes_without_a_quantization_config_are_not_taken_for_bf16(config: RunConfig, tmp_path: Path) -> None:
    """The stage would otherwise be skipped, and the codes' scales be called tensors of another model."""
    codes = torch.ones(2, 2).to(torch.float8_e4m3fn)
    write_hf(tmp_path / "codes", [("a.weight", codes), ("a.weight_scale_inv", torch.ones(1, 1))], {"model_type": "x"})
    coded = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "codes")})})
    cluster = Cluster()
    with refuses(ValueError, "a.weight", "float8_e4m3fn", "config.json", "quantization_config"):
        go(cluster, coded, tmp_path / "runs" / "a")
    assert not cluster.ran


def test_hidden_folders_of_a_checkpoint_are_not_staged(config: RunConfig, tmp_path: Path) -> None:
    """A clone's .git holds every weight once more."""
    (tmp_path / "model" / ".git").mkdir()
    (tmp_path / "model" / ".git" / "pack").write_text("large")
    go(Cluster(), config, tmp_path / "runs" / "a", stages="fetch,dequantize,convert,stage")
    staged = {p.name for p in (tmp_path / "runs" / "cache").glob("stage-*/data/hf/**/*")}
    assert "config.json" in staged and "pack" not in staged


def test_all_that_was_converted_is_staged(config: RunConfig, tmp_path: Path) -> None:
    """Shards without their hidden `.metadata` cannot be read."""
    go(Cluster(), config, tmp_path / "runs" / "a", stages="fetch,dequantize,convert,stage")
    (made,) = (tmp_path / "runs" / "cache").glob("convert-*/data")
    (staged,) = (tmp_path / "runs" / "cache").glob("stage-*/data/megatron")
    assert {p.name for p in staged.iterdir()} == {p.name for p in made.iterdir()} == {"half", "whole", ".metadata"}


def test_a_stage_with_nothing_to_do_does_not_read_the_checkpoint_again(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for its marker nor beside hidden folders: for a large model that takes an hour. Files that were touched
    since are hashed again."""
    (tmp_path / "model" / ".git").mkdir()
    (tmp_path / "model" / ".git" / "pack").write_text("large")
    hashed: list[str] = []

    def sha256(path: Path) -> str:
        hashed.append(path.name)
        return file_sha256(path)

    monkeypatch.setattr(completion, "file_sha256", sha256)
    go(Cluster(), config, tmp_path / "a" / "run", stages="fetch,dequantize")
    assert sorted(hashed) == ["config.json", "model.safetensors"]
    fused = config.model_copy(update={"convert": config.convert.model_copy(update={"fuse": True})})
    go(Cluster(), fused, tmp_path / "a" / "run", stages="fetch,dequantize")
    assert len(hashed) == 2
    root = tmp_path / "model"
    files = {name: {"size": 1, "sha256": "", "mtime_ns": (root / name).stat().st_mtime_ns} for name in ("config.json",)}
    assert _as_left(root, {"fetch": Output(root, files)}) == {"config.json": (1, "")}
    os.utime(root / "config.json", (0, 0))
    assert not _as_left(root, {"fetch": Output(root, files)})


class Saving(Cluster):
    """Training is a checkpoint a step, up to `steps`; then it is asked to stop, if it is to be `stopped`."""

    steps, stopped = 3, False

    def parts(self) -> StageFunctions:
        def train(config: RunConfig, run_dir: Path, served: Path, weights: Path, resume: bool, _: Fence) -> None:
            checkpoints = run_dir / "checkpoints"
            began = run_state.load_latest(checkpoints) if resume else None
            first = began[1].step if began else 0
            self.ran.append(f"train from {first}")
            for n in range(first + 1, self.steps + 1):
                run_state.empty_folder(checkpoints, n)
                run_state.save(checkpoints, run_state.RunState(step=n, weight_version=n, tokens_total=n), keep=3)
            if self.stopped:
                stop = StopRequest()
                stop.ask("SIGTERM", 143)
                raise stop.stopped(self.steps)

        return dataclasses.replace(super().parts(), train=train)


Command = Callable[..., Result]


@pytest.fixture
def saving(monkeypatch: pytest.MonkeyPatch) -> Saving:
    cluster = Saving()
    monkeypatch.setattr(assemble, "known_model", lambda _: None)
    monkeypatch.setattr(assemble, "stage_functions", lambda *_, force: cluster.parts())
    return cluster


@pytest.fixture
def command(config: RunConfig, tmp_path: Path) -> Command:
    """The command line, on the run directory `runs/a`."""
    (tmp_path / "run.toml").write_text(dump_config(config))
    how = ["train", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "runs" / "a")]
    return lambda *more: CliRunner().invoke(app, [*how, *more], env={"COLUMNS": "500"})


@pytest.mark.parametrize("stages", ["fetch,convert", "fetch,dequantize,convert"])
def test_a_fused_conversion_needs_no_dequantize_stage(
    saving: Saving, command: Command, tmp_path: Path, stages: str
) -> None:
    """It decodes itself: both lists of stages run the same. Without --fuse the missing stage is named."""
    done = command("--stages", stages, "--fuse")
    assert done.exit_code == 0 and saving.ran == ["convert"], done.output
    assert not list((tmp_path / "runs" / "cache").glob("dequantize-*/data"))
    again = command("--stages", stages, "--fuse")
    assert again.output.count("complete, skipped") == 3 and saving.ran == ["convert"]
    planned = command("--stages", stages, "--fuse", "--dry-run")
    assert planned.exit_code == 0 and planned.output.count("not selected") == 2
    other = command("--stages", stages)
    assert (other.exit_code == 0) == ("dequantize" in stages)
    if other.exit_code:
        check_refusal(other.stderr.strip(), "convert", "dequantize", "--stages")


def as_first_written(cache: Path) -> None:
    """Markers as they were before their paths were relative."""
    for path in cache.glob("*/.complete.json"):
        marker = json.loads(path.read_text())
        root = str((path.parent / marker["root"]).resolve())
        path.write_text(json.dumps({k: v for k, v in marker.items() if k != "version"} | {"root": root}))


@pytest.fixture
def coded(config: RunConfig, tmp_path: Path) -> RunConfig:
    """Of a model that is made, in FP8: every stage has files in the cache."""
    for name in ("model.json", "tokenizer.json", "corpus"):
        (tmp_path / name).write_text("{}")
    make = {"config": str(tmp_path / "model.json"), "tokenizer": str(tmp_path)}
    files = {"corpus": str(tmp_path / "corpus"), "validation": str(tmp_path / "corpus")}
    return RunConfig.model_validate(config.model_dump() | {"model": {"path": "made", "make": make | files}})


class Making(Cluster):
    def parts(self) -> StageFunctions:
        def make(config: RunConfig, out: Path) -> None:
            self.ran.append("make")
            write_hf(out, [("a.weight", torch.ones(2, 2, dtype=torch.bfloat16))], {"model_type": "x"})

        return dataclasses.replace(super().parts(), make=make)


@pytest.mark.parametrize("old", [False, True])
def test_a_moved_cache_is_complete_and_a_copied_one_has_its_own_files(
    coded: RunConfig, tmp_path: Path, old: bool
) -> None:
    """Markers with absolute paths sent a copy to the original's files, and redid a moved one with a false reason."""
    before, cluster = tmp_path / "runs", Making()
    go(cluster, coded, before / "a")
    if old:
        as_first_written(before / "cache")
    shutil.copytree(before, tmp_path / "copy")  # with other times
    printed = go(cluster, coded, tmp_path / "copy" / "b", stages="fetch,dequantize,convert,stage")
    assert printed.count("complete, skipped") == 4 and printed.count(f"{tmp_path}/copy/cache/") == 4
    for shard in before.glob("cache/*/data/**/whole"):
        shard.write_text("other")
    assert go(cluster, coded, tmp_path / "copy" / "b").count("complete, skipped") == 4
    before.rename(tmp_path / "moved")
    for shard in (tmp_path / "moved").glob("cache/*/data/**/whole"):
        shard.write_text("whole")
    printed = go(cluster, coded, tmp_path / "moved" / "a")
    assert printed.count("complete, skipped") == 5 and str(before) + "/" not in printed, printed
    assert cluster.ran == ["make", "convert", "train", "train"]


def test_a_copy_is_hashed_once(coded: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(Making(), coded, tmp_path / "runs" / "a")
    shutil.copytree(tmp_path / "runs" / "cache", tmp_path / "copy", copy_function=shutil.copy)
    hashed: list[Path] = []
    monkeypatch.setattr(completion, "file_sha256", lambda path: hashed.append(path) or file_sha256(path))
    elsewhere = coded.model_copy(update={"cache_dir": str(tmp_path / "copy")})
    for again in (False, True):
        hashed.clear()
        go(Making(), elsewhere, tmp_path / "other" / "b", stages="fetch,dequantize,convert,stage")
        assert bool(hashed) is not again and len(hashed) == len(set(hashed))


def test_the_cache_is_named_and_can_be_chosen(saving: Saving, command: Command, tmp_path: Path) -> None:
    """By an option, by a key, else beside the run directory; a run directory on another disk says which other cache it
    leaves aside."""
    with contextlib.chdir(tmp_path):  # away from a cache that a run of this checkout has left
        dry = command("--dry-run")
    assert f"cache  {tmp_path}/runs/cache (beside the run directory)\n" in dry.stdout
    assert command().exit_code == 0
    for how in (["--cache-dir", str(tmp_path / "runs/cache")], ["--set", f"cache_dir={tmp_path}/runs/cache"]):
        done = command("--run-dir", str(tmp_path / "disk" / "b"), *how, "--dry-run")
        assert f"cache  {tmp_path}/runs/cache (cache_dir)" in done.stdout
        assert done.stdout.count("[complete, would be skipped]") == 4
    with contextlib.chdir(tmp_path):
        done = command("--run-dir", str(tmp_path / "disk" / "b"), "--dry-run")
    line = f"cache  {tmp_path}/disk/cache (beside the run directory); to reuse the outputs in {tmp_path}/runs/cache"
    assert f"{line}, pass --cache-dir runs/cache" in done.stdout
    assert command("--cache-dir", str(tmp_path / "runs/cache")).stdout.count("complete, skipped") == 5


def test_two_commands_do_not_write_one_directory(config: RunConfig, tmp_path: Path) -> None:
    """Runs side by side share the cache: the second waits for what the first is making, and takes it as it is.

    Seen before there was a lock: "data.partial: Directory not empty". Not covered: file systems without flock.
    """
    runs, cluster = tmp_path / "runs", Cluster()
    with ThreadPoolExecutor(2) as threads:
        printed = list(threads.map(lambda name: go(cluster, config, runs / name), ("a", "b")))
    assert sorted(cluster.ran) == ["convert", "train", "train"], printed


def test_a_run_directory_in_use_is_refused(config: RunConfig, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with (runs / ".a.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with refuses(ValueError, "--run-dir"):
            go(Cluster(), config, runs / "a")
    go(Cluster(), config, runs / "a")


def test_a_finished_run_goes_on_from_any_kept_step_and_from_no_other(
    saving: Saving, command: Command, tmp_path: Path
) -> None:
    """A step that is not there is refused before anything is done, also by a dry run, with those that are."""
    assert command().exit_code == 0
    marker, latest = (tmp_path / "runs" / "a" / name for name in (".complete.json", "checkpoints/latest"))
    for more in ((), ("--dry-run",)):
        refused = command("--from-step", "9", *more)
        assert refused.exit_code == 2
        check_refusal(refused.stderr, "--from-step", 9, 1, 2, 3)
    assert marker.exists() and latest.read_text() == "step_3\n"
    assert command("--from-step", "1", "--fresh").exit_code == 2
    assert command("--from-step", "1").exit_code == 0
    assert marker.exists() and latest.read_text() == "step_3\n"
    assert saving.ran == ["convert", "train from 0", "train from 1"]


def test_the_option_that_a_damaged_checkpoint_is_told_with_works(
    saving: Saving, command: Command, tmp_path: Path
) -> None:
    saving.stopped = True
    ended = command()
    assert ended.exit_code == 143, ended.output
    assert "stopped: SIGTERM: step 3 is saved, --resume continues from it" in ended.stdout and not ended.stderr
    damaged = tmp_path / "runs" / "a" / "checkpoints" / "step_3" / "groups.safetensors"
    damaged.unlink()
    refused = command("--resume")
    assert refused.exit_code == 2
    check_refusal(refused.stderr, damaged, "--from-step", 2)
    option = refused.stderr.strip().rsplit("resume from it with ", 1)[1]
    assert option == "--from-step 2"
    saving.stopped = False
    assert command(*option.split()).exit_code == 0
    assert saving.ran == ["convert", "train from 0", "train from 2"]


def test_another_layout_stages_what_is_missing_in_the_same_directory(config: RunConfig, tmp_path: Path) -> None:
    """Over several nodes the stage always runs, because node k may be another machine than last time; files that were
    verified are not read again, and a later stage alone takes what is there."""
    cluster, run_dir = Cluster(), tmp_path / "runs" / "a"
    go(cluster, config, run_dir)
    (staged,) = (tmp_path / "runs" / "cache").glob("stage-*/data")
    times = {p: p.stat().st_mtime_ns for p in staged.rglob("*") if p.is_file()}
    two = config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": 2})})
    printed = go(cluster, two, tmp_path / "runs" / "b")
    assert "(configuration changed)" in printed
    assert list((tmp_path / "runs" / "cache").glob("stage-*/data")) == [staged]
    assert "(each node verifies its copy)" in go(cluster, two, tmp_path / "runs" / "c")
    assert times == {p: p.stat().st_mtime_ns for p in staged.rglob("*") if p.is_file()}
    go(cluster, two, tmp_path / "runs" / "d", stages="train")
    assert cluster.ran == ["convert", "train", "train", "train", "train"]
