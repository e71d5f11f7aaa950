"""Law: a free run goes on with its samples over publications, kills and resumes, and every token that it trains is
within the bound.

Free runs sample while weights are trained and published, so their samples are of several weights; which, follows from
the clock. What must hold whatever the clock says: no token is older than max_staleness, every row is replayed by the
routes of the weights that sampled it, a half-done sample that was saved is the beginning of the one that is trained,
and every sample issued is trained once or discarded once with a reason, over all kills.

The real loop, server and Megatron rank on plain processes (tests/support/local_run.py). Not covered: several servers
or ranks, environments, latencies chosen to break the bound (test_staleness_bound.py has the loop without models for
it).
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from miles_like.checkpoint.ledger_audit import audit
from miles_like.checkpoint.run_state import load
from miles_like.types import Sample
from tests.support.forked import tail
from tests.support.kill_points import Kill
from tests.support.local_run import TINY, Runs

# answers long enough that some are under way at every publication
FREE = ("alignment.deterministic=false", "eval.every=0", "rollout.max_new_tokens=200")
TRAINED = 8  # samples a step
LONG = pytest.mark.long(beside="tests/laws/test_free_runs.py")
SUSPENDED = pytest.mark.long(beside="tests/laws/test_suspended_rollouts.py")  # kills: test_kills.py
Row = dict[str, Any]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with Runs(tmp_path_factory.mktemp("free")) as started:
        yield started


def lines(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def samples(run_dir: Path, step: int) -> list[Row]:
    """That step number `step` trained, counted from 1: by weights step - 1."""
    return lines(run_dir / "rollouts" / f"step_{step}.jsonl")


def within(run_dir: Path, steps: Sequence[int], bound: int) -> int:
    """Tokens under loss are of known weights, none older than the bound; how many samples are of several weights."""
    mixed = 0
    for step in steps:
        found = samples(run_dir, step)
        assert len(found) == TRAINED
        for s in found:
            spans = s["versions"]
            assert all(0 <= step - 1 - version <= bound for version, _, _ in spans), (step, spans)
            assert sum(end - start for _, start, end in spans) == sum(s["loss_mask"])
            mixed += len(spans) > 1
    return mixed


def accounted(run_dir: Path, steps: int) -> None:
    found = audit(run_dir / "ledger.jsonl")
    assert (found.wrong, found.unfinished) == (None, 0)
    assert [totals.step for totals in found.steps] == list(range(1, steps + 1))
    assert found.steps[-1].trained == TRAINED * steps
    rows = lines(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(steps + 1))
    assert all(row["routing/replay_coverage"] == 1 for row in rows[1:])


def begun(checkpoint: Path) -> list[Sample]:
    """Half-done samples that it holds."""
    partial = [g for key, g in load(checkpoint).groups.items() if key.startswith("partial/")]
    return [s for g in partial for s in g.samples if s.response_len]


@pytest.mark.parametrize(
    "modes",  # and how many steps of each; the samples of the first three may all be of one version
    [
        pytest.param({"retract": 4, "in_place": 3}, id="retract, in place", marks=SUSPENDED),
        pytest.param({"abort": 4, "retract": 4, "in_place": 4}, id="every mode", marks=LONG),
    ],
)
def test_half_done_samples_go_on_over_publications_and_kills_within_the_bound(
    runs: Runs, modes: Mapping[str, int]
) -> None:
    """Each part of the run has another pause mode and ends by SIGKILL in the middle of a step, but the last."""
    # a busy machine may have no sample under way at the publications of a mode, or half done at a kill: then the run
    # says nothing, and is repeated
    wheres = [runs.home / f"killed-{len(modes)}-{attempt}" for attempt in range(3)]
    found = [0]
    while found[-1] < 2 and len(found) <= len(wheres):
        found.append(went_on_over_kills(runs, wheres[len(found) - 1], modes))
    assert found[-1] > 1, f"samples of each attempt that went on, modes {dict(modes)}: {found[1:]}"


def went_on_over_kills(runs: Runs, where: Path, modes: Mapping[str, int]) -> int:
    """Samples that were half done at a kill and trained after it, each checked. modes: their steps."""
    last, saved, done = sum(modes.values()), list[Sample](), 0
    for mode, count in modes.items():
        steps = range(done + 1, done + count + 1)
        done += count
        settings = (*FREE, "buffer.max_staleness=2", f"train.steps={last}", f"publish.pause_mode={mode}")
        kill = Kill(victim="driver", point="step", step=steps[-1], where="before") if steps[-1] < last else None
        code = runs.run(where, settings, kill)
        assert code == (0 if kill is None else -signal.SIGKILL), tail(where / "driver.log")
        if not within(where, steps, 2):
            return 0
        if kill is not None:
            saved += begun(where / "checkpoints" / f"step_{steps[-1]}")
    accounted(where, last)
    assert audit(where / "ledger.jsonl").steps[-1].discarded == 0  # nothing was ever too old
    trained = {(s["prompt_id"], s["index"]): s for step in range(1, last + 1) for s in samples(where, step)}
    went_on = [s for s in saved if (s.prompt_id, s.index) in trained]
    if len(went_on) < 2:
        return len(went_on)
    for s in went_on:
        row, n = trained[s.prompt_id, s.index], len(s.token_ids)
        assert row["token_ids"][:n] == s.token_ids.tolist()
        was = [[v.version, v.start, v.end] for v in s.versions]
        assert row["versions"][: len(was) - 1] == was[:-1]
        assert row["versions"][len(was) - 1][:2] == was[-1][:2]  # the last span may be longer now
    longer = [s for s in went_on if len(trained[s.prompt_id, s.index]["token_ids"]) > len(s.token_ids)]
    assert longer, "all that was saved had ended"
    return len(went_on)


@pytest.mark.long(beside="tests/miles_like/loop/test_old_tokens.py")
def test_old_tokens_are_taken_out_of_the_loss_and_the_rest_is_trained(runs: Runs) -> None:
    """Twice as many groups beyond a step's as the bound alone would let be trained."""
    where, steps = runs.home / "masked", 8
    settings = ("buffer.max_staleness=1", "buffer.over_sampling=2.0", "buffer.old_tokens=mask", f"train.steps={steps}")
    assert runs.run(where, (*FREE, *settings)) == 0, tail(where / "driver.log")
    within(where, range(1, steps + 1), 1)
    accounted(where, steps)
    masked = 0
    for step in range(1, steps + 1):
        first = dict[str, list[int]]()  # tokens before the first under loss: the prompt, and what was masked
        for s in samples(where, step):
            first.setdefault(s["prompt_id"], []).append((s["loss_mask"] + [1]).index(1))
        masked += sum(n > min(group) for group in first.values() for n in group)
    assert masked > 0


def test_a_source_that_ends_is_sampled_once_and_accounted_for(runs: Runs) -> None:
    """With a filter, and answers so short that it leaves groups out. What cannot fill a step is discarded."""
    where, given = runs.home / "ended", 22
    few = runs.home / "few.jsonl"
    few.write_text("".join((TINY.parent / "tiny" / "train.jsonl").read_text().splitlines(keepends=True)[:given]))
    settings = ("buffer.max_staleness=2", f"data.train={few}", "data.epochs=1", "algorithm.filter=nonzero_std")
    code = runs.run(where, (*FREE, *settings, "rollout.max_new_tokens=4", "train.steps=20"))
    assert code == 0, tail(where / "driver.log")
    found = audit(where / "ledger.jsonl")
    end = found.steps[-1]
    assert (found.wrong, found.unfinished) == (None, 0)
    assert (end.groups, end.issued, end.in_flight) == (given, 2 * given, 0)
    assert end.trained == TRAINED * len(list((where / "rollouts").glob("step_*.jsonl"))) > 0
    equal = {"all rewards equal", "all rewards equal (0)", "all rewards equal (1)"}
    assert {*equal, "the prompts ended"} >= set(found.reasons)
