"""Law: a run that SIGTERM or its deadline has ended, and that is resumed, is the run that was never stopped, byte for
byte.

Runs on a shared machine are stopped often. A run saves where it stands: the boundary before the step that waits for its
samples, or the one after the step that is trained or published. Neither may lose or repeat anything, in lockstep as in
a synchronous run; the status says which of the two ended it.

The real loop, server and Megatron rank on plain processes (tests/support/local_run.py); SIGTERM is sent by the run to
itself, as it comes to the place. Not covered: free runs (test_free_runs.py), what does not end within
grace_s (tests/miles_like/test_stopping.py), Ray.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.forked import tail
from tests.support.local_run import Runs, drive, untimed

LONG = pytest.mark.long(beside="tests/laws/test_stopped_runs.py")
SETTINGS = ("checkpoint.every=0", "eval.every=0")
# phase, the step it is of, the steps one of which is then saved: samples may come before the signal does
PLACES = (("rollout", 1, (1, 2)), ("train", 3, (4,)), ("publish", 4, (5,)))
# a greedy answer beside two others, whose requests a checkpoint keeps apart
REMAX = ("algorithm.name=remax", "train.samples_per_group=3")
CASES = [  # staleness, steps, places, more settings
    pytest.param(2, 3, PLACES[:1], (), id="2"),
    pytest.param(2, 6, PLACES, (), id="2, later", marks=LONG),
    pytest.param(0, 6, PLACES, (), id="0", marks=LONG),
    pytest.param(2, 3, PLACES[:1], REMAX, id="2, with greedy answers", marks=LONG),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("stopped")) as started:
        yield started


def stopped(run_dir: Path, home: Path, settings: Sequence[str], phase: str, step: int) -> int:
    """A driver that gets SIGTERM when it comes to the phase, in the middle of what is awaited there."""
    from miles_like.run import train as train_module

    class Watched(train_module.PhaseBar):
        def phase(self, at: int, name: str) -> None:
            super().phase(at, name)
            if (name, at) == (phase, step):
                asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)

    train_module.PhaseBar = Watched
    return drive(run_dir, home, settings, None)


def late(run_dir: Path, home: Path, settings: Sequence[str], seconds: float) -> int:
    """A driver whose deadline is in so many seconds: it was forked from a process that began long before."""
    from miles_like.stopping import command_began

    return drive(run_dir, home, [*settings, f"checkpoint.deadline_s={time.time() - command_began() + seconds}"], None)


def latest(run_dir: Path) -> int:
    return int((run_dir / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))


@pytest.mark.parametrize(("staleness", "steps", "places", "more"), CASES)
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    runs: Runs,
    tmp_path: Path,
    staleness: int,
    steps: int,
    places: Sequence[tuple[str, int, Sequence[int]]],
    more: Sequence[str],
) -> None:
    where, settings = tmp_path, (*SETTINGS, *more, f"train.steps={steps}", f"buffer.max_staleness={staleness}")
    whole, cut, log = where / "whole", where / "cut", where / "cut" / "driver.log"
    assert runs.run(whole, settings) == 0, tail(whole / "driver.log")
    for phase, step, saved in places:
        assert runs.call(log, stopped, cut, runs.home, settings, phase, step) == 128 + signal.SIGTERM, tail(log)
        assert (before := latest(cut)) in saved, phase
        if phase == "rollout" and len(places) > 1:  # the deadline is there when the next step is done
            assert runs.call(log, late, cut, runs.home, settings, 0.0) == os.EX_TEMPFAIL, tail(log)
            assert latest(cut) == before + 1
    assert runs.run(cut, settings) == 0, tail(log)
    for name in ("metrics.jsonl", "ledger.jsonl"):
        assert untimed(cut / name) == untimed(whole / name), name
