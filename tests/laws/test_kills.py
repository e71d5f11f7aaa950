"""Law: a run that is killed and resumed, however often, is the run that was never killed, bit for bit.

A deterministic run is a function of its configuration, and a checkpoint holds all of its state at a boundary between
steps; so whatever a killed process took along is done again to the same bits, and whatever it left behind of later
steps (half a checkpoint, rows of metrics, rollouts) must not be seen. SIGKILL leaves no process the time to tidy up.

Each chain is one run that is killed again and again, at named points and at random ones, and resumed each time. Every
kill has a witness: what the process at the point saw there, on disk before the signal was sent. The runs are small and
on plain processes (tests/support/local_run.py), all else is real.

Not covered: Ray's actors, GPUs, a machine that loses what it had not yet written to disk.
"""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.checkpoint.ledger_audit import audit
from miles_like.checkpoint.run_state import load
from tests.support.chosen import later
from tests.support.forked import tail
from tests.support.kill_points import VICTIMS, Kill, witnesses
from tests.support.local_run import PLAYED, Runs, tensors, untimed

HERE = "tests/laws/test_kills.py"
STEPS = 8  # each save but the last two is whole before two more publications
POINTS = ("generation", "step", "publish", "save")
AT_LEAST = 30


def kill(victim: str, point: str, step: int, where: Any) -> Kill:
    return Kill(victim=victim, point=point, step=step, where=where)


# in the order that a run comes to them, with a checkpoint after every second step
EVERYWHERE = (
    kill("driver", "generation", 0, 20),
    kill("rank", "step", 1, "before"),
    kill("server", "publish", 2, 1),
    kill("rank", "save", 2, "shards"),
    kill("driver", "save", 2, "run_state.json"),
    kill("driver", "save", 2, "latest"),
    kill("server", "generation", 2, 30),
    kill("driver", "step", 2, "half"),
    kill("rank", "publish", 3, 2),
    kill("server", "step", 3, "half"),
    kill("rank", "generation", 3, 5),
    kill("driver", "publish", 4, 3),
    kill("server", "save", 4, "run_state.json"),
)


def at_random(seed: str, steps: Sequence[int]) -> tuple[Kill, ...]:
    """Each some moment after the publication of a version, of which a step takes about a fifth of a second."""
    draw = random.Random(seed)
    return tuple(kill(VICTIMS[i % 3], "random", step, draw.uniform(0.0, 0.25)) for i, step in enumerate(steps))


@dataclass(frozen=True)
class Chain:
    """One run: `settings` beside QUICK's, and how it is killed."""

    settings: tuple[str, ...]
    kills: tuple[Kill, ...]
    steps: int = STEPS


EPISODES = "one behind, two ranks, a filter, at random, episodes"
CHAINS = {
    "synchronous": Chain(("checkpoint.every=2",), EVERYWHERE + at_random("synchronous", [4, 4, 5])),
    "two behind": Chain(
        ("checkpoint.every=2", "buffer.max_staleness=2", "checkpoint.asynchronous=true"),
        EVERYWHERE + at_random("two behind", [4, 4, 5]),
    ),
    "one behind, two ranks, a filter": Chain(
        ("parallel.dp=2", "parallel.ep=2", "buffer.max_staleness=1", "algorithm.filter=nonzero_std"),
        (kill("rank", "save", 3, "shards"),),  # of another victim and point: test_turns.py
        steps=5,
    ),
    "servers load beside training": Chain(
        ("checkpoint.every=2", "buffer.max_staleness=1", "publish.path=disk", "publish.during_training=true"),
        (
            kill("rank", "step", 1, "before"),
            kill("driver", "generation", 2, 10),
            kill("server", "step", 3, "half"),
            kill("driver", "step", 3, "half"),
            kill("rank", "save", 4, "shards"),
            *at_random("beside training", [3, 4, 5]),
        ),
    ),
    EPISODES: Chain(
        ("parallel.dp=2", "parallel.ep=2", "buffer.max_staleness=1", "algorithm.filter=nonzero_std", *PLAYED),
        (
            kill("rank", "step", 1, "half"),
            kill("driver", "step", 2, "half"),
            kill("driver", "save", 3, "latest"),
            *at_random("one behind", [3, 4, 5]),
        ),
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("kills")) as started:
        yield started


def believed(seen: dict[str, Any]) -> bool:
    """Whether a witness says that the kill was at its point."""
    at, where = seen["seen"], seen["where"]
    match seen["point"]:
        case "generation":
            return at["version"] == str(seen["step"]) and at["generated"] >= where and at["running"] > 0
        case "step" if where == "before":
            return at["with_gradient"] > 0 and at["masters_moved"] == 0
        case "step":
            return at["masters_moved"] > 0 and at["models_moved"] == 0
        case "publish":
            return at["buckets_sent"] == where > 0 and not at["last"]
        case "save" if where == "shards":
            return not at["whole"] and any(name.endswith(".distcp") for name in at["files"])
        case "save":
            written = "trainer" in at["files"] and at["latest"] != f"step_{seen['step']}"
            return written and ("run_state.json" in at["files"]) == (where == "latest")
    return at["under_way"] != "start"


def killed(runs: Runs, run_dir: Path, settings: Sequence[str], blow: Kill) -> dict[str, Any]:
    """One start, which ends by the kill; its witness."""
    before, log = len(witnesses(run_dir)), run_dir / "driver.log"
    code = runs.run(run_dir, settings, blow)
    found = witnesses(run_dir)[before:]
    assert len(found) == 1, f"{blow}: the run did not come there; {log} ends:\n{tail(log)}"
    assert believed(found[0]), found[0]
    assert code == (-signal.SIGKILL if blow.victim == "driver" else 2), f"{blow}: {code}; {log} ends:\n{tail(log)}"
    return found[0]


def same(run_dir: Path, whole: Path, steps: int) -> None:
    """Everything that a run leaves, but clocks."""
    for step in range(1, steps + 1):
        kept = [where / "rollouts" / f"step_{step}.jsonl" for where in (run_dir, whole)]
        assert kept[0].read_bytes() == kept[1].read_bytes(), f"samples of step {step}"
    found, want = (tensors(where / "checkpoints" / f"step_{steps}" / "trainer") for where in (run_dir, whole))
    assert found.keys() == want.keys() and len(found) > 20
    for name, x in found.items():
        assert x.view(torch.uint8).equal(want[name].view(torch.uint8)), name
    assert (run_dir / "ledger.jsonl").read_bytes() == (whole / "ledger.jsonl").read_bytes()
    assert untimed(run_dir / "metrics.jsonl") == untimed(whole / "metrics.jsonl")


@pytest.mark.parametrize("name", later(CHAINS, first=["one behind, two ranks, a filter"], beside=HERE))
def test_a_run_killed_and_resumed_is_the_run_that_was_never_killed(runs: Runs, name: str) -> None:
    chain, where = CHAINS[name], runs.home / name.replace(" ", "-")
    settings = [*chain.settings, f"train.steps={chain.steps}"]
    assert runs.run(where / "whole", settings) == 0, tail(where / "whole" / "driver.log")
    for blow in chain.kills:
        killed(runs, where / "killed", settings, blow)
    assert runs.run(where / "killed", settings) == 0, tail(where / "killed" / "driver.log")
    same(where / "killed", where / "whole", chain.steps)
    waiting = load(where / "whole" / "checkpoints" / f"step_{chain.steps - 2}").groups
    assert bool(waiting) == any("max_staleness" in words for words in settings)  # what waits is saved, and is resumed
    assert audit(where / "whole" / "ledger.jsonl").wrong is None
    if name == EPISODES:
        rows = [json.loads(line) for line in (where / "whole" / "metrics.jsonl").read_text().splitlines()]
        assert min(row["rollout/turns/mean"] for row in rows[1:]) > 1


FREE = {  # settings, kills
    "samples": (
        (),
        (
            kill("server", "generation", 2, 5),
            kill("driver", "step", 3, "half"),
            kill("driver", "save", 4, "latest"),
            kill("rank", "publish", 5, 1),
        ),
    ),
    "episodes": (
        (*PLAYED, "rollout.environment=tests.support.local_run:Slower", "eval.every=0"),
        (kill("driver", "save", 4, "latest"), kill("rank", "publish", 5, 1)),
    ),
}


@pytest.mark.long(beside="tests/laws/test_free_runs.py")
@pytest.mark.parametrize("name", FREE)
def test_a_free_run_killed_and_resumed_loses_nothing_and_trains_nothing_twice(runs: Runs, name: str) -> None:
    """Which weights sample a group there follows from the clock, so no two such runs are the same. Episodes are in
    flight when it is saved: a new environment gets the turns that they had."""
    settings, kills = FREE[name]
    free = ("checkpoint.every=2", "buffer.max_staleness=2", "buffer.lockstep=false", f"train.steps={STEPS}", *settings)
    where = runs.home / f"free-{name}" / "killed"
    for blow in kills:
        killed(runs, where, free, blow)
    saved = load(where / "checkpoints" / (where / "checkpoints" / "latest").read_text().strip())
    assert runs.run(where, free) == 0, tail(where / "driver.log")
    found = audit(where / "ledger.jsonl")
    assert found.wrong is None and found.unfinished == 0
    assert [totals.step for totals in found.steps] == list(range(1, STEPS + 1))
    assert found.steps[-1].trained == STEPS * 8
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert max(row.get("async/staleness/max", 0.0) for row in rows) <= 2
    in_flight = [s for key, g in saved.groups.items() if key.startswith("partial/") for s in g.samples if s.spans]
    replayed, again = (
        sum(row.get(f"perf/episodes/{what}", 0.0) for row in rows[saved.step + 1 :])
        for what in ("replayed", "begun_anew")
    )
    assert (replayed, again) == (len(in_flight), 0) and bool(in_flight) == (name == "episodes")


@pytest.mark.long(beside=HERE)
def test_every_process_is_killed_at_every_point_and_at_random_ones_thirty_times_in_all(runs: Runs) -> None:
    """By the witnesses of the runs above, not by what was planned."""
    found = [w for where in sorted(runs.home.glob("*/killed")) for w in witnesses(where)]
    assert len(found) >= AT_LEAST
    counts = Counter((w["victim"], w["point"]) for w in found)
    assert all(counts[victim, point] for victim in VICTIMS for point in (*POINTS, "random")), counts
