"""Law: where samples are made and held changes nothing that a run computes.

With 0, 1 and 3 rollout workers a deterministic run has the same metrics, ledger, weights and optimizer state, byte for
byte; a resumed run too, also one that resumes with another number of workers. The real loop, server, Megatron ranks and
worker code; the workers are in the driver's process, which opens nothing that holds values of tokens except what these
workers read from the servers. Not covered: Ray (tests/e2e/test_workers_run.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.forked import tail
from tests.support.local_run import Runs, tensors, untimed

STEPS = ("train.steps=3", "eval.every=0", "checkpoint.every=1", "parallel.dp=2", "rollout.servers=2")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("workers")) as started:
        yield started


def ran(runs: Runs, name: str, workers: int, *more: str) -> Path:
    where = runs.home / name
    status = runs.run(where, (*STEPS, f"rollout.workers={workers}", *more))
    assert status == 0, tail(where / "driver.log")
    return where


def same(one: Path, other: Path) -> None:
    assert (one / "ledger.jsonl").read_bytes() == (other / "ledger.jsonl").read_bytes()
    assert untimed(one / "metrics.jsonl") == untimed(other / "metrics.jsonl")
    a, b = (tensors(where / "checkpoints" / "step_3" / "trainer") for where in (one, other))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    assert sorted((one / "rollouts" / "step_3.jsonl").read_text().splitlines()) == sorted(
        (other / "rollouts" / "step_3.jsonl").read_text().splitlines()
    )


@pytest.mark.slow
def test_any_number_of_workers_computes_the_same_bits(runs: Runs) -> None:
    alone = ran(runs, "alone", 0)
    for workers in (1, 3):
        same(ran(runs, f"by {workers}", workers), alone)
