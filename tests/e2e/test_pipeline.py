"""The real thing, small: five stages through the command, with Ray, Megatron ranks, an engine process and R3.

One run is shared by the tests of this file: the demo of the installed wheel, without the checkout. It is looked at from
outside in the middle: what it leaves open, and where its secrets are. Not covered: that it learns (docs/learning.md),
multi-node placement, what stock SGLang opens (tests/sglang_cpu), what SIGTERM leaves (test_faults.py).
"""

from __future__ import annotations

import ipaddress
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import tomli_w
import torch
import typer
from typer.testing import CliRunner

from miles_like.config.load import load_config
from miles_like.hf.checkpoint import HFCheckpoint
from scripts import run_deepseek
from tests.e2e.conftest import (
    LIMIT_S,
    ONE_RANK,
    ROOT,
    SMALL,
    Run,
    environment,
)
from tests.e2e.looked_at import PLANTED, SECRET, Seen, descendants, look
from tests.e2e.test_faults import in_mid_run
from tests.support.command import Commands
from tests.support.installed import MadeOnce, environment_without_checkout
from tests.support.refusals import Facts, check_refusal

Start = Callable[..., "subprocess.Popen[str]"]
THREE = ("--set", "train.steps=3", "--set", "eval.every=2")


class Demo(NamedTuple):
    """The first run."""

    run_dir: Path
    seen: Seen  # in the middle of it
    left: list[list[str]]  # command lines of processes that outlived the command


@pytest.fixture(scope="module")
def miles_like_demo(python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Start]:
    """The folder in which the installed `miles-like demo` runs, and that command with more arguments."""
    cwd = tmp_path_factory.mktemp("demo")
    words = [str(python.parent / "miles-like"), "demo", *SMALL]
    variables = environment_without_checkout() | {SECRET: PLANTED}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return cwd, lambda *more: subprocess.Popen([*words, *more], cwd=cwd, env=variables, **pipes)


def completed(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    with process:
        output, errors = process.communicate(timeout=LIMIT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


@pytest.fixture(scope="module")
def demo(miles_like_demo: tuple[Path, Start], made_once: MadeOnce, tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The first run, looked at after its first step; from its cache the other workers have theirs."""
    cwd, command = miles_like_demo
    run_dir = cwd / "runs" / "demo"
    with made_once() as cache:
        with command(*THREE) as process:
            try:
                in_mid_run(process, run_dir, steps=1)
                seen = look(process, tmp_path_factory.mktemp("elsewhere"))
                started_by_it = descendants(process)
                output = process.communicate(timeout=LIMIT_S)
            finally:
                process.kill()
        assert process.returncode == 0, output
        _, alive = psutil.wait_procs(started_by_it, timeout=20)
        if cache is not None and not cache.exists():
            shutil.copytree(cwd / "runs" / "cache", cache.with_name("new")).rename(cache)
    return Demo(run_dir, seen, [p.cmdline() for p in alive])


def metrics(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_run_leaves_what_it_promises(demo: Demo) -> None:
    """Files and metric names are what users and dashboards rely on."""
    run_dir = demo.run_dir
    assert sorted(p.name for p in run_dir.parents[1].iterdir()) == ["runs"]
    for name in (
        "config.toml",
        "metrics.jsonl",
        "report.html",
        "rollouts/step_3.jsonl",
        "tokenizer.json",
        "checkpoints/latest",
    ):
        assert (run_dir / name).is_file(), name
    assert list((run_dir / "tensorboard").iterdir())
    rows = metrics(run_dir)
    assert [r["step"] for r in rows] == [0, 1, 2, 3]
    wanted = (
        *("weight_version", "wall_s", "tokens_total", "train/loss", "train/pg_loss", "train/grad_norm", "train/lr"),
        *("train/entropy", "train/kl_old", "train/clip_frac/low", "train/clip_frac/high", "train/is_weight/mean"),
        *("train/is_weight/max", "rollout/reward/mean", "rollout/reward/std", "rollout/len/mean"),
        *("rollout/truncated_frac", "rollout/zero_std_group_frac", "mismatch/logprob_abs_diff"),
        *("mismatch/logprob_abs_diff_max", "mismatch/kl", "mismatch/extreme_frac", "mismatch/ess"),
        *("routing/replay_coverage", "routing/agreement", "async/staleness/mean", "async/staleness/max"),
        *("async/dropped", "perf/tokens_per_s_rollout", "perf/tokens_per_s_train", "perf/step_s", "perf/rollout_s"),
        *("perf/train_s", "perf/publish_s", "perf/pause_s", "sync/bytes", "sync/seconds", "sync/triton"),
        "rollout/triton",
    )
    assert not [k for k in wanted if k not in rows[1]]
    assert rows[1]["sync/triton"] == rows[1]["rollout/triton"] == 0, "PyTorch encodes and decodes on a CPU"
    assert {r["step"] for r in rows if "eval/heldout/avg@1" in r} == {0, 2, 3}


def test_routes_are_replayed_whole_and_the_first_rollout_is_served_as_the_checkpoint_is(demo: Demo) -> None:
    """Coverage 1: every fed token's experts are the rollout's. At step 1 both sides hold the same decoded FP8 values
    (the trainer's rounded to bf16 exactly as the dequantized checkpoint is), so only arithmetic differs."""
    first, *later = metrics(demo.run_dir)[1:]
    assert first["routing/replay_coverage"] == 1.0
    assert first["routing/agreement"] > 0.9
    assert first["mismatch/logprob_abs_diff"] < 0.05
    assert all(r["routing/replay_coverage"] == 1.0 for r in later)
    assert all(r["async/staleness/max"] == 0 for r in later)


def test_samples_are_readable(demo: Demo) -> None:
    rows = [json.loads(x) for x in (demo.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert len(rows) == 24
    assert all(re.fullmatch(r"\d+[-+*/]\d+=", r["prompt"]) for r in rows)


def test_every_listener_is_on_loopback(demo: Demo) -> None:
    """Of Ray, trainer ranks (store and gloo) and rollout servers; each kind must be among them, or nothing was seen."""
    names = " ".join(name for name, *_ in demo.seen.listeners)
    for kind in ("gcs_server", "raylet", "ray::_Rank", "python"):
        assert kind in names, demo.seen.listeners
    beyond = [
        found for found in demo.seen.listeners if not ipaddress.ip_address(found[1].removeprefix("::ffff:")).is_loopback
    ]
    assert not beyond


def test_its_end_leaves_no_process(demo: Demo) -> None:
    assert not demo.left, demo.left


def test_a_process_without_the_token_is_refused_by_ray(demo: Demo) -> None:
    """Asked directly, without a token and with another one, the cluster refuses; joining fails too."""
    for what, done in demo.seen.strangers.items():
        assert done.returncode != 0 and "KEYS" not in done.stdout and "JOINED" not in done.stdout, what
        assert PLANTED not in done.stdout + done.stderr
    for what in ("asks", "asks with another token"):
        assert "Authentication token is missing or incorrect" in demo.seen.strangers[what].stderr, what


def test_no_secret_is_in_a_file_of_the_run_or_on_a_command_line(demo: Demo) -> None:
    secrets = demo.seen.secrets()
    looked_at = 0
    for path in (p for p in demo.run_dir.rglob("*") if p.is_file()):
        content = path.read_bytes()
        looked_at += 1
        for name, value in secrets.items():
            assert value.encode() not in content, f"{name} is in {path}"
    assert looked_at > 10
    for name, value in secrets.items():
        assert not [c for c in demo.seen.commands if value in c], name


def test_servers_do_not_inherit_ray_s_token(demo: Demo) -> None:
    processes = zip(demo.seen.commands, demo.seen.environments, strict=True)
    servers = [e for c, e in processes if "-m rollout.embedded.server" in c]
    assert servers and not [e for e in servers if "RAY_AUTH_TOKEN" in e]


def test_the_run_s_server_answers_nobody_without_its_key(demo: Demo) -> None:
    assert demo.seen.unasked == {
        "/health": 200,
        "/model_info": 401,
        "/server_info": 401,
        "/pause_generation": 401,
        "/generate": 401,
    }


def test_a_second_run_skips_everything(miles_like_demo: tuple[Path, Start], demo: Demo) -> None:
    """What is whole and made from the same inputs is not made again. Without a cluster to join: there, each node looks
    at what it has, which may be another machine's disk (tests/cluster/test_separate_disks.py)."""
    again = completed(miles_like_demo[1](*THREE))
    assert again.returncode == 0, again.stderr[-2000:]
    assert again.stdout.count("complete, skipped") == 5


def test_a_damaged_output_is_made_again_and_a_finished_run_is_not_overwritten(
    miles_like_demo: tuple[Path, Start], demo: Demo
) -> None:
    """The dequantized directory loses a byte: that stage is redone, the others are whole and stay."""
    cwd, command = miles_like_demo
    tensors = next(cwd.glob("runs/cache/dequantize-*/data/model*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-1])
    again = completed(command(*THREE))
    assert again.returncode == 0, again.stderr[-2000:]
    assert "bytes, not" in again.stdout
    assert again.stdout.count("complete, skipped") == 4
    refused = completed(command("--set", "train.steps=9"))
    assert refused.returncode == 2
    check_refusal(refused.stderr, "--run-dir", "--resume", "--fresh")


def test_the_trained_model_is_exported_from_the_run_alone(demo: Demo, python: Path, tmp_path: Path) -> None:
    """The tensors of the BF16 checkpoint that the run began with, with other values if a step had a gradient, and its
    tokenizer."""
    words = [str(python.parent / "miles-like"), "export", str(demo.run_dir), str(tmp_path / "out"), "--step", "3"]
    subprocess.run(words, cwd=tmp_path, env=environment_without_checkout(), check=True, timeout=LIMIT_S)
    (began,) = demo.run_dir.parents[1].glob("runs/cache/dequantize-*/data")
    ours, theirs = HFCheckpoint(tmp_path / "out"), HFCheckpoint(began)
    assert set(ours.names()) == set(theirs.names())
    changed = [name for name in ours.names() if not torch.equal(ours.read(name), theirs.read(name))]
    moved = any(row["train/grad_norm"] > 0 for row in metrics(demo.run_dir)[1:])
    assert bool(changed) == moved
    assert all(ours.info(name)[:2] == theirs.info(name)[:2] for name in ours.names())  # dtype, shape
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (began / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def taught(run: Run, home: Path) -> dict[str, float]:
    """The metrics of a step without replay, in which each third of the prompts has a teacher of another kind: the
    checkpoint that the run began with, on a server that the run starts and beside the trainer's weights, and the policy
    itself, with the answer in its prompt."""
    rows = [json.loads(x) for x in (ROOT / "configs" / "tiny" / "train.jsonl").read_text().splitlines()[:60]]
    prompts, config = home / "sources.jsonl", home / "taught.toml"
    sources = ("served", "swapped", "hinted")
    prompts.write_text("\n".join(json.dumps(r | {"source": sources[i % 3]}) for i, r in enumerate(rows)))
    (checkpoint,) = home.glob("cache/fetch-*/data")
    made = load_config(ROOT / "configs" / "tiny.toml", SMALL[1::2]).model.make
    assert made is not None
    teachers: dict[str, dict[str, Any]] = {
        "served": {"make": made.model_dump(mode="json", exclude_none=True)},  # whole already: the student's own
        "swapped": {"kind": "weights", "path": str(checkpoint)},
        "hinted": {"kind": "self", "prompt": "{prompt}{answer}"},  # after an answer even a beginner says something else
    }
    settings = {
        "extends": str(ROOT / "configs" / "tiny.toml"),
        "data": {"train": str(prompts)},
        "distillation": {"mode": "alone", "teachers": {n: t | {"sources": [n]} for n, t in teachers.items()}},
    }
    config.write_text(tomli_w.dumps(settings))
    how = ("--set", "train.steps=1", "--set", "replay.mode=off", "--set", "train.groups_per_step=12", *ONE_RANK)
    done = run("--config", str(config), "--run-dir", str(home / "taught"), *SMALL, *how)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "warm-up" not in done.stdout
    return metrics(home / "taught")[1]


@pytest.mark.long(beside="tests/miles_like/experience/test_teachers.py")
def test_every_kind_of_teacher_speaks_of_the_tokens_that_it_was_asked_about(taught: dict[str, float]) -> None:
    """A teacher with the student's weights agrees with it but for rounding and re-chosen experts; a model that sees the
    answer differs, even an untrained one. Rewards teach nothing here, yet weights move."""
    own = 0.01
    assert abs(taught["distill/reverse_kl/served"]) < 1e-3
    assert abs(taught["distill/reverse_kl/swapped"]) < own
    assert taught["distill/reverse_kl/hinted"] > 10 * own
    tokens = [taught[f"distill/tokens/{name}"] for name in ("served", "swapped", "hinted")]
    assert all(tokens) and sum(tokens) == taught["distill/tokens"] == taught["rollout/tokens"]
    assert taught["train/grad_norm"] > 0


@pytest.mark.long(beside="tests/laws/test_replay_exact.py")
def test_replay_off_still_reports_agreement_and_mismatch(taught: dict[str, float]) -> None:
    """The same metrics with and without replay, so that the effect of replay can be measured."""
    row = taught
    assert row["routing/replay_coverage"] == 0.0
    assert 0.5 < row["routing/agreement"] <= 1.0
    assert row["mismatch/kl"] >= 0.0


@pytest.mark.long(beside="tests/laws/test_kills.py")
def test_resume_goes_on_from_the_checkpoint(miles_like_demo: tuple[Path, Start], demo: Demo) -> None:
    """Steps are counted on, the optimizer's step too (learning rate), and the weights are the published ones."""
    more = completed(miles_like_demo[1]("--set", "train.steps=5", "--resume"))
    assert more.returncode == 0, more.stderr[-2000:]
    rows = metrics(demo.run_dir)
    assert [r["step"] for r in rows] == [0, 1, 2, 3, 4, 5]
    assert rows[-1]["train/lr"] > rows[3]["train/lr"]
    assert rows[-1]["tokens_total"] > rows[3]["tokens_total"]


@pytest.mark.long(beside="tests/laws/test_other_loop.py")
def test_the_example_of_another_loop_runs_as_its_command(
    commands: Commands, ray: Mapping[str, str], home: Path
) -> None:
    """docs/examples/two_passes.py CONFIG RUN_DIR; what its loop does is held by tests/laws/test_other_loop.py."""
    settings = {
        "extends": str(ROOT / "configs" / "tiny.toml"),
        "model": {"make": {"max_steps": 20, "check_every": 10}},  # as SMALL: the checkpoint is there
        "parallel": {"dp": 1, "ep": 1},
        "train": {"steps": 1, "groups_per_step": 2, "samples_per_group": 2},
        "eval": {"max_prompts": 2, "every": 0},
    }
    config, run_dir = home / "two_passes.toml", home / "two_passes"
    config.write_text(tomli_w.dumps(settings))
    script = str(ROOT / "docs" / "examples" / "two_passes.py")
    done = commands.run(script, (str(config), str(run_dir)), environment(**ray), LIMIT_S)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    rows = metrics(run_dir)
    assert [row["weight_version"] for row in rows] == [0, 1] and "first_pass/train/loss" in rows[1]
    assert (run_dir / "report.html").is_file()


@pytest.mark.long(beside="tests/miles_like/rewards/maths/test_answer_table.py")
def test_word_problems_run_through_the_same_reader_and_math_verify(run: Run, home: Path) -> None:
    """GSM8K's own rows, judged by math-verify; a model this small is not expected to be right."""
    config = str(ROOT / "configs" / "tiny_gsm8k.toml")
    done = run(
        *("--config", config, "--run-dir", str(home / "words"), *SMALL[:4]),
        *("--set", "train.steps=1", "--set", "eval.max_prompts=4", "--set", "rollout.embedded.threads=1"),
        *ONE_RANK,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert metrics(home / "words")[1]["rollout/len/mean"] > 0
    rows = [json.loads(x) for x in (home / "words" / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert any("How" in r["prompt"] for r in rows)


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (("--stages", "fetch,tain"), ("tain",)),
        (("--stages", "train"), ("train",)),
        (("--set", "data.train=./none.jsonl"), ("none.jsonl",)),
        (("--set", "model.make.config=./none.json"), ("none.json",)),
        (("--set", "parallel.ep=4", "--set", "parallel.dp=2"), ("parallel.ep", 4)),
        (("--config", "none.toml"), ("none.toml", "--config")),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: tuple[str, ...], facts: Facts
) -> None:
    """The command in this process, which has imported it all."""
    monkeypatch.chdir(ROOT)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(run_deepseek.main)
    done = CliRunner().invoke(app, ["--run-dir", str(tmp_path / "x"), *arguments])
    assert done.exit_code == 2, (done.output, done.exception)
    check_refusal(done.stderr, *facts)
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "x").exists()


def test_a_mistake_is_status_2_to_the_shell_too(shell: Run, tmp_path: Path) -> None:
    done = shell("--run-dir", str(tmp_path / "x"), "--set", "train.stps=1")
    assert done.returncode == 2
    check_refusal(done.stderr, "train.stps", "train.steps")
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.long(beside="tests/miles_like/preflight/test_dry_run.py")
def test_a_dry_run_touches_nothing(alone: Run, tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "deepseek_v3_fp8.toml")
    done = alone("--config", config, "--run-dir", str(tmp_path / "v3"), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert (
        "--tp-size 32" in done.stdout and "--attn-dp-size 32" in done.stdout and "trainer ranks 120-127" in done.stdout
    )
    assert "1,342,052,868,096 bytes" in done.stdout
    assert not list(tmp_path.iterdir())
