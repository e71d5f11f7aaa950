"""A part dies or hangs in the middle of a run: one sentence, status 2, nothing left running, nothing taken for whole.

Each test has a witness that the fault happened in mid-run (a step is in metrics.jsonl before it). A run is started
again by --supervise, or by hand with --resume. Not covered: recovery in place (tests/laws/test_rebuilt_ranks.py,
tests/laws/test_replaced_servers.py).
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from miles_like.checkpoint.run_state import load_latest
from tests.e2e.conftest import ONE_RANK, ROOT, SMALL, command, environment
from tests.e2e.looked_at import descendants
from tests.support.local_run import untimed
from tests.support.refusals import check_refusal

ENDLESS = (
    *("--set", "train.steps=500"),
    *("--set", "eval.every=0"),
    *("--set", "rollout.request_timeout_s=8.0"),
    *("--set", "rollout.restarts=0"),  # tests/laws/test_replaced_servers.py
    *("--set", "cluster.rebuilds=0"),  # tests/laws/test_rebuilt_ranks.py
)
# a server that dies is named there, and every kill of one ends the run in tests/laws/test_kills.py
NAMED = pytest.mark.long(beside="tests/miles_like/cluster/test_rollout_servers.py")


@contextmanager
def started(
    run_dir: Path, *more: str, size: tuple[str, ...] = SMALL, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command("--run-dir", str(run_dir), *size, *ENDLESS, *more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**variables),
        # a shell's background jobs ignore Ctrl-C, and so would this one if the tests run in such a job
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        yield process
    finally:
        family = descendants(process)
        if process.poll() is None:
            process.kill()
        for p in family:
            if p.is_running():
                p.kill()
        process.communicate(timeout=30)


def named(process: subprocess.Popen[str], what: str) -> list[psutil.Process]:
    found = []
    for p in descendants(process):
        try:
            if what in " ".join(p.cmdline()):
                found.append(p)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def in_mid_run(process: subprocess.Popen[str], run_dir: Path, within: float = 400.0, steps: int = 2) -> None:
    """`steps` are done and the next is under way. Most of the time is the checkpoint's making, where it is new."""
    deadline = time.monotonic() + within
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if metrics.exists() and len(metrics.read_text().splitlines()) > steps:
            return
        time.sleep(0.1)
    raise AssertionError(f"no step within {within:g} s")


def ended(process: subprocess.Popen[str], family: list[psutil.Process]) -> str:
    """Its stderr; it must have ended by itself with status 2 and stopped its processes."""
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 2, errors[-3000:]
    assert len(errors.strip().splitlines()) == 1, errors
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, [p.cmdline() for p in alive]
    return errors


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        pytest.param(signal.SIGKILL, "closed the connection|cannot be reached", id="dies", marks=NAMED),
        pytest.param(signal.SIGSTOP, "did not answer .* within 8 s", id="hangs", marks=NAMED),
    ],
)
def test_a_rollout_server_dies_or_hangs(home: Path, how: signal.Signals, cause: str) -> None:
    run_dir = home / f"fault-{how.name}"
    with started(run_dir, *ONE_RANK) as process:
        in_mid_run(process, run_dir)
        family = descendants(process)
        module = "rollout.embedded.server"  # its guard has the same words, further on
        (server,) = [p for p in named(process, module) if p.cmdline()[2] == module]
        server.send_signal(how)
        errors = ended(process, family)
    assert re.search(rf"server http://127\.0\.0\.1:\d+ .*({cause})", errors), errors
    assert not (run_dir / ".complete.json").exists()


@pytest.mark.long(beside="tests/miles_like/cluster/test_workers.py")
def test_a_trainer_rank_is_stopped_in_mid_run(home: Path) -> None:
    """As a deadlocked collective: the other rank waits for it. The stacks of both are kept."""
    run_dir = home / "fault-stopped-rank"
    with started(run_dir, "--set", "parallel.dp=2", "--set", "cluster.timeout_s=60") as process:
        in_mid_run(process, run_dir)
        family = descendants(process)
        ranks = named(process, "ray::_Rank")
        ranks[0].suspend()
        errors = ended(process, family)
    assert re.search(r"\w+: trainer ranks? [01]( and 1)? of 2 did not answer within [\d.]+ s", errors), errors
    assert re.search(r"; rank [01] had been stopped by a signal", errors), errors
    check_refusal(errors, "cluster.timeout_s", unrecorded="it depends on the moment")
    for i in range(2):
        assert "most recent call first" in (run_dir / "logs" / f"trainer_rank{i}.log").read_text()
    assert not (run_dir / ".complete.json").exists()


@pytest.mark.long(beside="tests/miles_like/launch/test_supervise.py")
def test_a_killed_driver_is_started_again_and_leaves_the_run_that_was_not_killed(home: Path) -> None:
    """By --supervise: the supervisor goes on, and nothing is left running after its end."""
    settings = [f"--set={s}" for s in ("alignment.deterministic=true", "train.steps=6", "checkpoint.every=1")]
    whole, killed = home / "fault-none", home / "fault-supervised"
    with started(whole, *settings) as process:
        _, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
    with started(killed, *settings, "--supervise", "--set", "checkpoint.restart_wait_s=0") as process:
        in_mid_run(process, killed)
        (driver,) = psutil.Process(process.pid).children()
        driver.kill()
        output, errors = process.communicate(timeout=600)
        assert process.returncode == 0, errors[-3000:]
        assert "supervise: the driver was ended by SIGKILL: restart 1 of 5" in errors and "--resume" in errors
        assert not descendants(process)
    assert len((killed / "starts.jsonl").read_text().splitlines()) == 2, output
    for step in range(1, 7):
        name = f"rollouts/step_{step}.jsonl"
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
    assert (killed / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert untimed(killed / "metrics.jsonl") == untimed(whole / "metrics.jsonl")


def stopped_in_mid_save(rank: psutil.Process, checkpoints: Path) -> int:
    """The step whose checkpoint, not the first, is under way; the rank is held (SIGSTOP), so it stays under way."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (checkpoints / "latest").exists() and any(checkpoints.glob("step_*/trainer.partial/__0_*.distcp")):
            rank.suspend()
            time.sleep(0.2)  # the other ranks come to where they wait for this one
            for partial in checkpoints.glob("step_*/trainer.partial"):
                return int(partial.parent.name.removeprefix("step_"))
            rank.resume()
        time.sleep(0.002)
    raise AssertionError("no save was caught within 120 s")


@pytest.mark.long(beside="tests/laws/test_kills.py")
def test_a_trainer_rank_is_killed_while_a_checkpoint_is_written(home: Path) -> None:
    """Written beside the training: `latest` stays at the checkpoint before, which is whole."""
    run_dir = home / "fault-save"
    checkpoints = run_dir / "checkpoints"
    with started(run_dir, "--set", "checkpoint.every=1", "--set", "checkpoint.asynchronous=true") as process:
        in_mid_run(process, run_dir)
        family = descendants(process)
        rank = named(process, "ray::_Rank")[0]
        step = stopped_in_mid_save(rank, checkpoints)
        rank.kill()
        errors = ended(process, family)
    assert "a worker process died" in errors or "was not written" in errors, errors
    latest = load_latest(checkpoints)
    assert latest is not None and 1 <= latest[1].step < step
    assert (latest[0] / "trainer" / "metadata.json").exists()
    assert not (checkpoints / f"step_{step}" / "trainer").exists()
    assert not (run_dir / ".complete.json").exists()


@pytest.mark.long(beside="tests/laws/test_stopped_runs.py")
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_the_driver_is_told_to_stop(home: Path, how: signal.Signals) -> None:
    """A batch system's SIGTERM and a person's Ctrl-C: no server, rank or Ray process stays behind. Before SIGTERM's end
    the run saves the step that it is at, whole: --resume would go on from there."""
    run_dir = home / f"stop-{how.name}"
    with started(run_dir) as process:
        in_mid_run(process, run_dir)
        family = descendants(process)
        process.send_signal(how)
        output, errors = process.communicate(timeout=90)
        _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, [p.cmdline() for p in alive]
    assert process.returncode == 128 + how, errors[-3000:]
    latest = load_latest(run_dir / "checkpoints")
    if how == signal.SIGTERM:
        assert latest is not None
        rows = (run_dir / "metrics.jsonl").read_text().splitlines()
        assert latest[1].step == json.loads(rows[-1])["step"] >= 2
        assert f"stopped: SIGTERM: step {latest[1].step} is saved, --resume continues from it" in output
    else:
        assert latest is None
    assert not (run_dir / ".complete.json").exists()


@pytest.mark.long(beside="tests/miles_like/preflight/test_preflight.py")
def test_a_port_in_use_is_said_with_its_number(tmp_path: Path) -> None:
    """Before the first stage."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with started(tmp_path / "run", *ONE_RANK, "--set", f"rollout.port={port}") as process:
            errors = ended(process, [])
    check_refusal(errors, port, "rollout.port")
    assert not list(tmp_path.glob("**/data")) and not (tmp_path / "run" / ".complete.json").exists()
