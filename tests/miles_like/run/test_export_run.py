"""`miles-like export` writes the model of a checkpoint that a run saved, and nothing where it could be another's;
`serve` serves that model.

The directory is found from the run's own files. Not covered: what training saves (tests/e2e/test_pipeline.py exports a
real run), formats and adapters (tests/megatron_bridge/convert), uploads (tests/miles_like/hf/test_push.py), what
a server answers (tests/rollout/embedded/server).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from rich.console import Console

from megatron_bridge.convert.to_megatron import to_megatron
from miles_like.checkpoint.run_state import RunState, save, step_folder
from miles_like.cli import app
from miles_like.config.load import dump_config, load_config
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.pipeline.convert import ConvertWork
from miles_like.pipeline.stages import StageFunctions, plan_stages, run_stages
from miles_like.run.serving import Servable, context_length, servable
from tests.support.cli_runner import CliRunner, Result
from tests.support.refusals import Facts, check_refusal, refuses
from tests.support.spawn import free_port
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

TINY = Path(__file__).parents[3] / "configs" / "tiny.toml"


def _refused(*_: object) -> None:
    raise AssertionError("a stage that an export does not need")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/a, a run with the checkpoints of steps 1 and 2; one/ and two/, what they hold; began/, its first model."""
    home, hf = tmp_path_factory.mktemp("home"), tiny()
    write_checkpoint(home / "began", hf, random_tensors(hf))
    config = load_config(TINY, [f"model.path={home}/began", "model.make=false"])
    run_dir = home / "runs" / "a"
    functions = StageFunctions(make=_refused, convert=_refused, on_nodes=_refused, train=_refused, sizes=None)
    run_stages(plan_stages(config, run_dir, functions), ["fetch"], Console(quiet=True), fresh=False)
    for step, name in enumerate(("one", "two"), 1):
        write_checkpoint(home / name, hf, random_tensors(hf, seed=step))
        folder = step_folder(run_dir / "checkpoints", step)
        to_megatron(home / name, folder / "trainer")
        shutil.rmtree(folder / "trainer" / "hf")  # a trainer saves none
        save(run_dir / "checkpoints", RunState(step=step, weight_version=step, tokens_total=1), keep=2)
    (run_dir / "config.toml").write_text(dump_config(config))
    return home


def export(*words: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, words)])


def same(a: Path, b: Path) -> bool:
    ours, theirs = HFCheckpoint(a), HFCheckpoint(b)
    return set(ours.names()) == set(theirs.names()) and all(
        torch.equal(ours.read(name), theirs.read(name)) for name in theirs.names()
    )


def test_a_step_is_the_model_that_was_saved_then(home: Path, tmp_path: Path) -> None:
    """The last one without --step."""
    last = export(home / "runs" / "a", tmp_path / "last")
    assert last.exit_code == 0, last.stderr
    first = export(home / "runs" / "a", tmp_path / "first", "--step", 1)
    assert first.exit_code == 0, first.stderr
    assert same(tmp_path / "last", home / "two") and same(tmp_path / "first", home / "one")
    assert not same(tmp_path / "first", home / "two")
    assert (tmp_path / "last" / "config.json").read_bytes() == (home / "began" / "config.json").read_bytes()


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--step", "7"], ("--step 7", "1, 2")),
        (["--format", "int3"], ("int3", "bf16")),
        (["--memory-limit", "lots"], ("'lots'", "4GiB")),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(home: Path, tmp_path: Path, words: list[str], facts: Facts) -> None:
    done = export(home / "runs" / "a", tmp_path / "out", *words)
    assert done.exit_code == 2 and not list(tmp_path.iterdir())
    check_refusal(done.stderr, *facts)


def test_a_directory_without_a_run_or_a_whole_checkpoint_is_refused(home: Path, tmp_path: Path) -> None:
    done = export(home / "began", tmp_path / "out")
    assert done.exit_code == 2
    check_refusal(done.stderr, home / "began", "config.toml")
    shutil.copytree(home / "runs", tmp_path / "runs")
    bare, damaged = tmp_path / "runs" / "bare", tmp_path / "runs" / "a"
    bare.mkdir()
    shutil.copy(damaged / "config.toml", bare)
    done = export(bare, tmp_path / "out")
    assert done.exit_code == 2
    check_refusal(done.stderr, bare / "checkpoints", "checkpoint.every")
    shard = next((damaged / "checkpoints" / "step_2" / "trainer").glob("*.distcp"))
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    done = export(damaged, tmp_path / "out")
    assert done.exit_code == 2 and not (tmp_path / "out").exists()
    check_refusal(done.stderr, "step_2", shard.name, unrecorded="a checksum")


def test_without_the_cache_the_first_model_is_asked_for(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs" / "a", tmp_path / "runs" / "a")
    done = export(tmp_path / "runs" / "a", tmp_path / "out")
    assert done.exit_code == 2
    check_refusal(done.stderr, tmp_path / "runs" / "a", "--hf-config")
    done = export(tmp_path / "runs" / "a", tmp_path / "out", "--hf-config", home / "began")
    assert done.exit_code == 0, done.stderr
    assert same(tmp_path / "out", home / "two")


def served(path: Path, lines: list[str] | None = None, **keys: object) -> Servable:
    report = [] if lines is None else lines
    return servable(path, ConvertWork(4 << 30, 1, None), report=report.append, **keys)  # type: ignore[arg-type]


def test_a_run_is_served_as_the_export_of_its_checkpoint_which_is_made_once(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs", tmp_path / "runs")
    run, lines = tmp_path / "runs" / "a", list[str]()
    last = served(run, lines)
    assert last.name == "a" and last.directory.parent.parent == tmp_path / "runs" / "cache"
    assert same(last.directory, home / "two")
    files = {p: p.stat().st_mtime_ns for p in last.directory.iterdir()}
    folder = run / "checkpoints" / "step_2"
    assert [served(path, lines) for path in (run, folder, folder / "trainer")] == [last] * 3
    assert {p: p.stat().st_mtime_ns for p in last.directory.iterdir()} == files
    assert [line.split(":")[0] for line in lines] == ["exported"] + ["using the existing export"] * 3
    first = served(run, step=1)
    assert same(first.directory, home / "one") and served(run / "checkpoints" / "step_1").directory == first.directory
    next(last.directory.glob("*.safetensors")).write_bytes(b"")  # damaged since, or by a kill
    assert served(run) == last and same(last.directory, home / "two")
    assert served(home / "began") == Servable(home / "began", "began")


def test_what_cannot_be_served_is_one_sentence(home: Path, tmp_path: Path) -> None:
    with refuses(ValueError, tmp_path, "config.json", "config.toml", "checkpoints/step_N"):
        served(tmp_path)
    with refuses(ValueError, home / "began", "--step"):
        served(home / "began", step=1)
    with refuses(ValueError, "--step 1", "step 2"):
        served(home / "runs" / "a" / "checkpoints" / "step_2", step=1)
    shutil.copytree(home / "runs", tmp_path / "runs")
    with refuses(ValueError, "--step 7", "1, 2"):
        served(tmp_path / "runs" / "a", step=7)
    with refuses(ValueError, "int3", "bf16"):
        served(tmp_path / "runs" / "a", format="int3")
    assert not list(tmp_path.glob("runs/cache/serve-*"))
    positions = tiny()["max_position_embeddings"]
    assert context_length(home / "began", None) == min(positions, 8192)
    assert context_length(home / "began", 64) == 64
    with refuses(ValueError, f"--context-length {positions + 1}", positions):
        context_length(home / "began", positions + 1)


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["--port", "80000"], ("port 80000", "1 to 65535")),
        (["--host", "10.9.9.9"], ("10.9.9.9", "an address of this machine")),
        (["--host", "0.0.0.0"], ("0.0.0.0", "--key-file")),
    ],
)
def test_a_server_that_cannot_listen_exports_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], facts: Facts
) -> None:
    monkeypatch.delenv("MILES_LIKE_SERVER_KEY", raising=False)
    shutil.copytree(home / "runs", tmp_path / "runs")
    port = [] if "--port" in words else ["--port", str(free_port())]
    done = CliRunner().invoke(app, ["serve", str(tmp_path / "runs" / "a"), *words, *port])
    assert done.exit_code == 2 and not list(tmp_path.glob("runs/cache/serve-*"))
    unrecorded = "a port" if port else ""
    check_refusal(done.stderr, *facts, unrecorded=unrecorded)


@pytest.mark.slow
@pytest.mark.long(beside="tests/rollout/embedded/server/test_app.py")
def test_serve_says_when_it_answers_and_with_what(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "runs", tmp_path / "runs")
    port = free_port()
    command = [sys.executable, "-m", "miles_like", "serve", str(tmp_path / "runs" / "a"), "--port", str(port)]
    more = ["--context-length", "64", "--threads", "1"]
    with subprocess.Popen(
        [*command, *more], stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if line.startswith("ready: ")), "")
            assert ready == f"ready: http://127.0.0.1:{port} a BF16, context 64\n"
            (model,) = httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False, timeout=30).json()["data"]
            assert (model["id"], model["max_model_len"]) == ("a", 64)
        finally:
            process.send_signal(signal.SIGTERM)
    assert process.wait(30) in (0, -signal.SIGTERM)
