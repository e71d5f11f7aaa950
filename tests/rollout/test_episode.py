"""Sampling and scoring of groups."""

from __future__ import annotations

import asyncio
import time

import pytest

from miles_like.types import Finish, Prompt, Sample, SamplingParams
from rollout.episode import run_groups
from tests.fakes import FakeEngine, make_prompt

PARAMS = SamplingParams(max_new_tokens=4)
PROMPTS = [make_prompt("a"), make_prompt("b")]


async def by_index(prompt: Prompt, sample: Sample) -> float:
    return (10 if prompt.id == "b" else 0) + sample.index


def test_every_sample_gets_its_own_reward() -> None:
    """A reward on another sample's place would push the wrong tokens; the engine's samples are left as they are."""
    groups = asyncio.run(run_groups(FakeEngine(), PROMPTS, by_index, n=3, params=PARAMS))
    assert [g.prompt.id for g in groups] == ["a", "b"]
    assert [g.rewards for g in groups] == [[0, 1, 2], [10, 11, 12]]


def test_rewards_run_at_the_same_time() -> None:
    """A reward may be a remote call: 40 of 0.1 s must not take 4 s."""

    async def slow(prompt: Prompt, sample: Sample) -> float:
        await asyncio.sleep(0.1)
        return 1

    began = time.monotonic()
    asyncio.run(run_groups(FakeEngine(), PROMPTS, slow, n=20, params=PARAMS))
    assert time.monotonic() - began < 2


def test_a_failing_reward_names_prompt_and_sample() -> None:
    """Never a silent 0: the policy would be taught that a correct answer is wrong."""

    async def broken(prompt: Prompt, sample: Sample) -> float:
        if (prompt.id, sample.index) == ("b", 1):
            raise KeyError("grade")
        return 1.0

    with pytest.raises(RuntimeError, match=r"prompt 'b', sample 1 failed: KeyError: 'grade'.*'b:1'"):
        asyncio.run(run_groups(FakeEngine(), PROMPTS, broken, n=2, params=PARAMS))


@pytest.mark.parametrize("value", [None, float("nan"), "1"])
def test_a_reward_that_is_no_number_is_refused(value: object) -> None:
    """A NaN would spread over its whole group's advantages."""

    async def odd(prompt: Prompt, sample: Sample) -> float:
        return value  # type: ignore[return-value]

    with pytest.raises(RuntimeError, match="want a number"):
        asyncio.run(run_groups(FakeEngine(), PROMPTS, odd, n=1, params=PARAMS))


def test_aborted_samples_are_reported_not_scored() -> None:
    """Their end is ours, not the policy's choice."""
    engine = FakeEngine(finish=Finish.ABORT)
    with pytest.raises(RuntimeError, match=r"4 samples came back aborted \(a/0, a/1, b/0, \.\.\.\)"):
        asyncio.run(run_groups(engine, PROMPTS, by_index, n=2, params=PARAMS))
