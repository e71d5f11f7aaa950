"""A run through Ray whose trainer ranks are killed while idle, in mid-step, mid-publish and mid-save, and stopped, goes
on by itself: the same driver, the same server process, and in the end the run that was not disturbed, bit for bit.

Nothing in the run knows of the kills (test_kills_ray.py). Not covered: several nodes (test_lost_node.py),
GPUs.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.conftest import Run
from tests.e2e.test_faults import named, started
from tests.e2e.test_kills_ray import RUN, Seen, Standing, agents, caught, in_step, latest, server_of
from tests.support.local_run import untimed

SETTINGS = (*RUN, "--set", "cluster.rebuilds=8")


def ranks(driver: Any) -> list[psutil.Process]:
    return named(driver, "ray::_Rank")


def is_rank(process: psutil.Process) -> bool:
    try:
        return "ray::_Rank" in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def server(driver: Any) -> psutil.Process:
    module = "rollout.embedded.server"  # its guard has the same words, further on
    (found,) = [p for p in named(driver, module) if p.cmdline()[2] == module]
    return found


def while_idle(driver: Any, run_dir: Path) -> Seen | None:
    """No call runs in the rank, and the server samples."""
    for rank in ranks(driver):
        with Standing(rank):
            title = " ".join(rank.cmdline()).strip()
            if title != "ray::_Rank" or not (seen := server_of(driver, run_dir))["running"]:
                return None
            rank.kill()
            return {"title": title, "running": seen["running"]}
    return None


def in_publication(driver: Any, run_dir: Path) -> Seen | None:
    """The server is paused, and a rank that publishes is killed."""
    for rank in named(driver, "ray::_Rank.publish"):
        with Standing(rank):
            if "ray::_Rank.publish" in " ".join(rank.cmdline()) and server_of(driver, run_dir)["paused"]:
                rank.kill()
                return {"paused": True}
    return None


def in_save(driver: Any, run_dir: Path) -> Seen | None:
    """A rank that stands has written a file of a checkpoint that has no name yet."""
    if not any((run_dir / "checkpoints").glob("step_*/trainer.partial/*.distcp")):
        return None
    for rank in ranks(driver):
        with Standing(rank):
            if found := sorted(p.name for p in (run_dir / "checkpoints").glob("step_*/trainer.partial/*.distcp")):
                rank.kill()
                return {"files": found}
    return None


def stopped(driver: Any, run_dir: Path) -> Seen | None:
    for rank in named(driver, "ray::_Rank.train"):
        rank.suspend()
        return {"title": " ".join(rank.cmdline()).strip()}
    return None


def restarted(driver: Any, before: set[int]) -> set[int]:
    """Pids of the ranks, once they are others than `before`."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert driver.poll() is None, driver.communicate()[1]
        with contextlib.suppress(psutil.NoSuchProcess):
            now = {p.pid for p in ranks(driver)}
            if now and not now & before:
                return now
        time.sleep(0.05)
    raise AssertionError(f"no other ranks within 300 s, but {before}")


def goes_on(run_dir: Path, driver: Any, *points: Any) -> list[dict[str, Any]]:
    """Rows of the run, of whose ranks one is lost at each of the points."""
    family: list[psutil.Process] = []
    served = None
    for at in points:
        after = latest(run_dir)
        seen, family = caught(driver, run_dir, at, after)
        began = time.monotonic()
        pids = {p.pid for p in family if is_rank(p)}
        now = server(driver)
        assert served in (None, now), "another server"
        served = now
        restarted(driver, pids)
        print(json.dumps({at.__name__: seen, "latest": after, "ranks after s": round(time.monotonic() - began, 2)}))
    out, errors = driver.communicate(timeout=300)
    assert driver.returncode == 0, errors[-3000:]
    print("\n".join(line.strip() for line in out.splitlines() if "rebuilt" in line))
    _, alive = psutil.wait_procs([p for p in family if p not in agents(family)], timeout=60)
    assert not alive, [p.cmdline() for p in alive]
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def same(run_dir: Path, whole: Path) -> None:
    for path in sorted((whole / "rollouts").glob("step_*.jsonl")):
        assert (run_dir / "rollouts" / path.name).read_bytes() == path.read_bytes(), path.name
    assert (run_dir / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert untimed(run_dir / "metrics.jsonl") == untimed(whole / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(run: Run, home: Path) -> Path:
    """The run that loses no rank."""
    done = run("--run-dir", str(home / "undisturbed"), *SETTINGS)
    assert done.returncode == 0, done.stderr[-3000:]
    return home / "undisturbed"


@pytest.mark.long(beside="tests/laws/test_rebuilt_ranks.py")
def test_a_run_whose_ranks_are_killed_four_times_goes_on_and_is_the_undisturbed_run(whole: Path, home: Path) -> None:
    run_dir = home / "rebuilt"
    with started(run_dir, *SETTINGS) as driver:
        rows = goes_on(run_dir, driver, while_idle, in_step, in_publication, in_save)
    assert max(row.get("perf/rebuilds", 0.0) for row in rows) == 4
    same(run_dir, whole)


@pytest.mark.long(beside="tests/laws/test_rebuilt_ranks.py")
def test_a_rank_that_hangs_is_replaced_at_its_deadline(whole: Path, home: Path) -> None:
    run_dir = home / "hung"
    with started(run_dir, *SETTINGS, "--set", "cluster.timeout_s=60") as driver:
        rows = goes_on(run_dir, driver, stopped)
    assert [row["perf/rebuilds"] for row in rows if "perf/rebuilds" in row] == [1.0]
    same(run_dir, whole)
