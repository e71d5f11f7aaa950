"""Law: a run whose evaluation falls goes back to its best checkpoint, bit for bit, and no number is used twice.

Weights, optimizer state and random states of the ranks are those of the best checkpoint; steps, weight versions, groups
and rounds go on counting; what the steps between had trained counts as discarded, and their prompts are sampled again
under other seeds. The ranks stay, but where they take turns with the servers they are started again.

Not covered: Ray's actors, GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.checkpoint.ledger_audit import ROLLED_BACK, audit
from miles_like.checkpoint.run_state import load
from miles_like.report.rows import read_metrics
from miles_like.stopping import BY_ALERT
from tests.support.chosen import later
from tests.support.forked import tail
from tests.support.local_run import TINY, Runs, tensors, untimed
from tests.support.planted import FROM

HERE = "tests/miles_like/run/watched/test_going_back.py"

GATE = (  # the evaluation falls with each version from FROM on, so also after the run went back
    "eval.every=1",
    "eval.max_prompts=12",
    "eval.sets.other.path=" + str(TINY.parent / "tiny" / "heldout.jsonl"),
    "eval.sets.other.reward=tests.support.planted:falling",
    "checkpoint.keep_best=eval/other/avg@1",
    "checkpoint.keep=2",
    "alerts.eval_regression.action=rollback",
    "alerts.rollbacks=1",
    "train.steps=9",
)
KINDS = {
    "synchronous": (),
    "two behind, saved beside training": ("buffer.max_staleness=2", "checkpoint.asynchronous=true"),
    "two ranks, a filter": ("parallel.dp=2", "parallel.ep=2", "algorithm.filter=nonzero_std"),
    "workers": ("rollout.workers=1", "buffer.max_staleness=1"),
    "turns": ("cluster.colocate=true",),
    "a critic": ("algorithm.name=ppo", "critic.lr=1e-3"),
    **{path: (f"publish.path={path}",) for path in ("disk", "delta", "distributed", "reshard")},
    "servers load beside training": (
        "buffer.max_staleness=1",
        "publish.path=disk",
        "publish.during_training=true",
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("back")) as started:
        yield started


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def went_back(rows: Sequence[dict[str, float]]) -> list[tuple[int, int]]:
    """(step, the step whose weights it has)."""
    return [(int(row["step"]), int(row["rollback/to"])) for row in rows if "rollback/to" in row]


def check_numbers(run_dir: Path) -> None:
    rows = lines(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all(row["weight_version"] == row["step"] for row in rows)
    published = [int(line.split()[2]) for line in (run_dir / "calls.txt").read_text().splitlines() if "publish" in line]
    assert all(a < b for a, b in pairwise(published)), published
    found = audit(run_dir / "ledger.jsonl")
    assert found.wrong is None and not found.unfinished
    last = found.steps[-1]
    assert last.issued == last.trained + last.discarded + last.in_flight
    assert {key: rows[-1][f"ledger/{key}"] for key in ("trained", "discarded")} == {
        "trained": last.trained,
        "discarded": last.discarded,
    }


@pytest.mark.parametrize("name", later(KINDS, ["synchronous"], beside=HERE))
def test_a_run_goes_back_once_and_then_ends_at_its_best_checkpoint_bit_for_bit(runs: Runs, name: str) -> None:
    where, settings = runs.home / name.replace(" ", "-"), (*GATE, *KINDS[name])
    assert runs.run(where, settings) == BY_ALERT, tail(where / "driver.log")
    rows = read_metrics(where / "metrics.jsonl")
    (first, best), (last, again) = went_back(rows)
    assert best == again < FROM < first < last == rows[-1]["step"]
    kept = where / "checkpoints"
    assert (kept / "latest").read_text().strip() == f"step_{last}"
    for model in ("trainer", "critic"):
        if (kept / f"step_{best}" / model).is_dir():
            one, other = (tensors(kept / f"step_{step}" / model) for step in (best, last))
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert (kept / f"step_{last}" / "trainer").is_dir()
    check_numbers(where)
    reasons = audit(where / "ledger.jsonl").reasons
    assert reasons[ROLLED_BACK] >= 2 * 8 and rows[-1]["ledger/trained"] == 8 * best
    pages = [(where / "incidents" / f"{n}.md").read_text().lower() for n in (1, 2)]
    assert f"step {first} has the weights of step {best}" in pages[0] and "other seeds (1 of 1 times)" in pages[0]
    assert f"step {last} has the weights of step {best}" in pages[1] and "the run ends" in pages[1]
    assert not (where / "incidents" / "3.md").exists()


def test_the_prompts_that_led_there_are_sampled_again_under_other_seeds(runs: Runs) -> None:
    where = runs.home / "synchronous"
    if not where.exists():
        assert runs.run(where, GATE) == BY_ALERT
    (first, best), _ = went_back(read_metrics(where / "metrics.jsonl"))
    one, other = (lines(where / "rollouts" / f"step_{step}.jsonl") for step in (best + 1, first + 1))
    assert [s["prompt_id"] for s in one] == [s["prompt_id"] for s in other]
    assert [s["token_ids"] for s in one] != [s["token_ids"] for s in other]


@pytest.mark.long(beside=HERE)
def test_a_run_that_went_back_goes_on_as_one_that_was_resumed_there(runs: Runs) -> None:
    """The checkpoint that going back makes is one like any other: a process that starts from it writes the same run as
    the one that made it, whose ranks had trained since."""
    within, resumed = runs.home / "within", runs.home / "resumed"
    settings = (*GATE, "alerts.rollbacks=9", "checkpoint.every=1", "train.steps=7")
    assert runs.run(within, settings) in (0, BY_ALERT), tail(within / "driver.log")
    assert runs.run(resumed, (*settings, "alerts.rollbacks=0")) == BY_ALERT, tail(resumed / "driver.log")
    (step, _), *_ = went_back(read_metrics(resumed / "metrics.jsonl"))
    assert load(resumed / "checkpoints" / f"step_{step}").groups == {}
    assert runs.run(resumed, settings) in (0, BY_ALERT), tail(resumed / "driver.log")
    assert untimed(within / "metrics.jsonl") == untimed(resumed / "metrics.jsonl")
    assert (within / "ledger.jsonl").read_bytes() == (resumed / "ledger.jsonl").read_bytes()


@pytest.mark.long(beside=HERE)
def test_a_run_without_a_best_checkpoint_ends_where_it_would_go_back(runs: Runs) -> None:
    where = runs.home / "nothing-kept"
    settings = (*GATE, "checkpoint.every=8")
    assert runs.run(where, settings) == BY_ALERT, tail(where / "driver.log")
    assert "There is no best checkpoint to go back to yet" in (where / "incidents" / "1.md").read_text()
    assert (where / "checkpoints" / f"step_{FROM}").is_dir()
