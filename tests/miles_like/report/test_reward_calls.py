"""Counts of the calls of rewards: what the figures of operations are computed from."""

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.config.sections.reward import RewardConfig
from miles_like.report.reward_calls import CAUSES, RewardTally
from miles_like.rewards.load import Rewards, scored_by
from miles_like.rewards.scorer import Limits, Scorer
from miles_like.types import Unit, Unscored
from tests.support.fakes import make_prompt
from tests.support.made_samples import sample

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
PROMPT = make_prompt("p")


def called(scorer: Scorer, n: int) -> RewardTally:
    tally = RewardTally()
    scorer.log = tally
    samples = [sample(index=i) for i in range(n)]
    asyncio.run(scorer([PROMPT] * n, samples))
    return tally


@pytest.mark.parametrize(
    ("outcome", "cause"),
    [(Unscored(reason="odd"), "unscored"), (Unscored(reason="gone", away=True), "away"), (None, "timeout")],
)
def test_what_fails_and_is_tried_again_has_its_cause(outcome: Unscored | None, cause: str) -> None:
    async def call(prompts: object, samples: object) -> object:
        if outcome is None:
            await asyncio.sleep(5)
        return outcome

    limits = Limits(timeout_s=0.02 if outcome is None else None, retries=2)
    tally = called(Scorer(call=call, limits=limits), 3)
    assert tally.retried == Counter({cause: 6}) and tally.failed == Counter({cause: 3}) and tally.waiting == 0
    assert len(tally.latencies) == 3


def test_a_sample_waits_until_its_score_is_there_and_its_latency_is_that_of_its_call() -> None:
    seen: list[int] = []
    tally = RewardTally()

    async def call(prompts: object, samples: object) -> float:
        seen.append(tally.waiting)
        await asyncio.sleep(0.02)
        return 1.0

    scorer = Scorer(call=call, log=tally)
    asyncio.run(scorer([PROMPT] * 2, [sample(index=i) for i in range(2)]))
    assert max(seen) == 2 and tally.waiting == 0
    assert len(tally.latencies) == 2 and min(tally.latencies) >= 0.02


def test_all_rewards_of_a_run_are_counted_together_also_parts_and_those_of_evaluation_sets() -> None:
    tally = RewardTally()
    rewards = Rewards(RewardConfig(parts={"exact": 1.0, "exact_number": 0.0}), log=tally)

    async def score() -> None:
        for name in (None, "exact"):
            await rewards(name)([PROMPT], [sample(index=0)])
        await rewards.close()

    asyncio.run(score())
    assert len(tally.latencies) == 3


def test_what_several_processes_count_is_counted_once() -> None:
    one, other = RewardTally(), RewardTally()
    one.begin(2)
    one.end(2, 1.0)
    one.retry("away", 4)
    one.begin(1)
    other.add(one.take())
    other.add(one.take())
    found = other.metrics()
    assert found["perf/reward/p99_s"] == 1.0 and found["perf/retries/reward_away"] == 4
    assert found["perf/queue/scoring"] == 0 and one.waiting == 1
    assert "perf/reward/p50_s" not in other.metrics()


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=300))
def test_percentiles_are_measured_times_that_enough_samples_had(latencies: list[float]) -> None:
    found = RewardTally(latencies=list(latencies)).metrics()
    for key, share in (("perf/reward/p50_s", 0.5), ("perf/reward/p99_s", 0.99)):
        assert found[key] in latencies
        assert np.mean(np.array(latencies) <= found[key]) >= share - 1e-9
        assert np.mean(np.array(latencies) < found[key]) < share


def test_every_figure_is_documented() -> None:
    tally = RewardTally(latencies=[1.0])
    assert len(CAUSES) == 3 and not [key for key in tally.metrics() if f"`{key}`" not in PAGE]


def test_a_reward_without_a_log_is_not_counted() -> None:
    scorer = scored_by(lambda prompt, sample: 1.0)
    assert scorer.log is None and scorer.unit is Unit.SAMPLE
