"""Law: where samples are made and held changes nothing that a run computes.

With 0, 1 and 3 rollout workers a deterministic run has the same metrics, ledger, rollouts, weights and optimizer state,
byte for byte; a resumed run too, also one that resumes with another number of workers. The real loop, server, Megatron
ranks and worker code; the workers are in the driver's process, which opens nothing that holds values of tokens except
what these workers read from the servers. Over Ray: tests/e2e/test_workers_over_ray.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from miles_like.checkpoint.ledger_audit import audit
from miles_like.checkpoint.run_state import latest_folder, load
from miles_like.report.rows import read_metrics
from miles_like.types import Prompt, Sample, SampleGroup
from tests.support.forked import tail
from tests.support.kill_points import Kill
from tests.support.local_run import COLUMNS, PLAYED, ROWED, Runs, same_run

HERE = "tests/laws/test_rollout_workers.py"
STEPS = (
    "train.steps=3",
    "eval.every=2",
    "eval.max_prompts=4",
    "checkpoint.every=1",
    "parallel.dp=2",
    "rollout.servers=2",
    "train.token_logprobs_every=2",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("workers")) as started:
        yield started


def ran(runs: Runs, name: str, workers: int, *more: str, kill: Kill | None = None) -> Path:
    where = runs.home / name
    status = runs.run(where, (*STEPS, f"rollout.workers={workers}", *more), kill)
    assert (status == 0) == (kill is None), tail(where / "driver.log")
    return where


def of_tokens(groups: Sequence[SampleGroup]) -> list[list[Any]]:
    """A user's advantages: of samples that are compared over the whole rollout, by what only their tokens and texts
    say; those of the last group are of its tokens."""
    mean = sum(len(s.text) for g in groups for s in g.samples) / sum(len(g.samples) for g in groups)
    out: list[list[Any]] = [[len(s.text) - mean + float(s.logprobs.sum()) for s in g.samples] for g in groups]
    return [*out[:-1], [s.token_ids / 64 - 1 for s in groups[-1].samples]]


def ranked(prompts: Sequence[Prompt], samples: Sequence[Sample]) -> list[float]:
    """A user's reward of a whole round: the share of its samples whose tokens have a smaller sum."""
    sums = [int(s.token_ids.sum()) for s in samples]
    return [sum(other < own for other in sums) / len(sums) for own in sums]


ROWS = "episodes of several rows"
PENALTY = ("algorithm.kl_in=reward", "algorithm.kl_coefficient=0.1")
CRITIC, TEACHER = COLUMNS
SHORT = ("train.steps=2", "eval.every=0")
CASES: dict[str, tuple[str, ...]] = {
    CRITIC: COLUMNS[CRITIC],
    "routes and rewards alone": (),
    "a penalty in the reward of whole samples, two mini-batches": (*SHORT, *PENALTY, "train.steps_per_rollout=2"),
    "a reference's ranks, a penalty in the loss": (
        *SHORT,
        "algorithm.kl_coefficient=0.1",
        "cluster.pools.reference.nodes=0",
    ),
    "turns with the trainer, two behind": ("cluster.colocate=true", "buffer.max_staleness=2", "eval.every=1"),
    TEACHER: (*SHORT, *COLUMNS[TEACHER]),
    "a teacher: the trainer's reference with another prompt, and turns": (
        *SHORT,
        "algorithm.kl_coefficient=0.1",
        "cluster.colocate=true",
        "distillation.mode=alone",
        "distillation.teachers.first={kind='self',weights='reference',prompt='{answer}! {prompt}'}",
    ),
    "a reward of whole rounds": (*SHORT, f"reward.name={__file__}:ranked", "buffer.max_staleness=1"),
    "reinforce++": (*SHORT, "algorithm.name=reinforce_pp"),
    "a greedy answer": (
        *SHORT,
        "algorithm.name=remax",
        "algorithm.mask_truncated=true",
        "rollout.max_new_tokens=40",
        *PENALTY,
    ),
    "episodes, each turn with its credit": (*SHORT, *PLAYED),
    ROWS: (*SHORT, *ROWED, *PENALTY, "algorithm.aggregation=sequence_mean", "train.steps_per_rollout=2"),
    "a user's advantages": (
        *SHORT,
        f"algorithm.advantage={__file__}:of_tokens",
        "algorithm.kl_coefficient=0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=pytest.mark.long(beside=HERE) if i else ()) for i, c in enumerate(CASES)]
)
def test_any_number_of_workers_computes_the_same_bits(runs: Runs, case: str) -> None:
    alone = ran(runs, case, 0, *CASES[case])
    assert '"trainer_logprobs": [' in (alone / "rollouts" / "step_2.jsonl").read_text()
    for row in read_metrics(alone / "metrics.jsonl")[1:]:
        of = [json.loads(x) for x in (alone / "rollouts" / f"step_{row['step']:.0f}.jsonl").read_text().splitlines()]
        inputs = [len(s["token_ids"]) - 1 for s in of if s["tokens"]]
        shares = [s["routing_agreement"] for s in of if s["tokens"]]
        mean = sum(n * share for n, share in zip(inputs, shares, strict=True)) / sum(inputs)
        assert mean == pytest.approx(row["routing/expert_agreement"], abs=1e-12), "samples and their step"
    for workers in (1, 3):
        same_run(ran(runs, f"{case}, by {workers}", workers, *CASES[case]), alone)
    if case == ROWS:
        _rows_are_trained_with_their_episodes(alone)


def _rows_are_trained_with_their_episodes(run_dir: Path) -> None:
    """Every second episode has two rows, of one reward and one advantage; the ledger counts it once."""
    found = [json.loads(line) for line in (run_dir / "rollouts" / "step_2.jsonl").read_text().splitlines()]
    of: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in found:
        of.setdefault((row["prompt_id"], row["index"]), []).append(row)
    assert all([r.get("row", 0) for r in rows] == list(range(1 + index % 2)) for (_, index), rows in of.items())
    assert all(len({(r["reward"], r["advantages"]) for r in rows}) == 1 for rows in of.values())
    assert any(r["advantages"] and r["tokens"] for r in found if r.get("row"))
    closed = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    assert all(line["rows"] == {"1": 2} for line in closed if line.get("trained") and "ticket" in line)
    last = read_metrics(run_dir / "metrics.jsonl")[-1]
    assert last["rollout/rows/mean"] == 1.5 and last["ledger/trained"] == 16.0


AHEAD = ("train.steps=4", "buffer.max_staleness=1", "algorithm.filter=nonzero_std", "rollout.servers=1")
LATER = Kill(victim="driver", point="generation", step=2, where=10)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_another_number_of_workers(runs: Runs) -> None:
    """With groups that wait in the workers at every boundary."""
    alone, by_three = ran(runs, "alone, ahead", 0, *AHEAD), "by 3, then 1, then 0"
    where = ran(runs, by_three, 3, *AHEAD, kill=LATER)
    waiting = load(latest_folder(where / "checkpoints"), groups=True).groups
    assert waiting and all(key.startswith("ready/") for key in waiting)
    ran(runs, by_three, 1, *AHEAD, kill=Kill(victim="rank", point="step", step=3, where="half"))
    same_run(ran(runs, by_three, 0, *AHEAD), alone)


@pytest.mark.long(beside=HERE)
def test_a_free_run_saves_the_samples_that_its_workers_have_in_flight(runs: Runs) -> None:
    """They go on where they were; every sample issued is trained or discarded once."""
    free = (
        *("alignment.deterministic=false", "rollout.max_new_tokens=200", "buffer.max_staleness=1"),
        *("train.steps=4", "eval.every=0"),
    )
    where = ran(runs, "free", 2, *free, kill=Kill(victim="driver", point="step", step=2, where="half"))
    groups = load(latest_folder(where / "checkpoints"), groups=True).groups
    half = {key: g for key, g in groups.items() if key.startswith("partial/")}
    assert any(s.versions for g in half.values() for s in g.samples)
    ran(runs, "free", 2, *free)
    found = audit(where / "ledger.jsonl")
    assert found.wrong is None and found.steps[-1].step == 4
