"""Rows of an episode that a generate function returns: names, one reward, each sampled token under loss once.

Not covered: what is trained of them (tests/miles_like/algorithms/advantages/test_rows_of_episodes.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from miles_like.protocols import RolloutEngine
from miles_like.rewards.load import scored_by
from miles_like.types import EnvironmentLost, Prompt, Sample, SampleGroup, SamplingParams, Unscored, VersionSpan
from rollout.episodes.custom_generate import CustomGenerate
from rollout.episodes.groups import run_groups
from rollout.episodes.resuming import ResumingEngine
from tests.support.refusals import Facts, refuses
from tests.support.talker import PARAMS, PROMPT, Talker, transcript

Rows = Sequence[Sample | Sequence[Sample]]


async def compacted(engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams) -> Rows:
    """Episode 1 has two rows: the second begins with the first turn, which is not under its loss, and goes on."""
    (group,) = await engine.generate([prompt], n=n, params=params)
    first, second = group.samples
    on = await engine.continue_sample(second, (60,), params=params)
    mask = on.loss_mask.clone()
    mask[: second.length] = False
    begun = int(mask.nonzero()[0])
    spans = (VersionSpan(0, 0, on.length - begun),)
    return [[second, replace(on, loss_mask=mask, logprobs=on.logprobs * mask, versions=spans)], first]


def scored(function: Any, reward: Any, *lines: str) -> SampleGroup:
    talker = Talker(*(lines or ("7", "24")), aborts=1)
    engine = CustomGenerate(ResumingEngine(talker), function, max_tokens=60)
    (group,) = asyncio.run(run_groups(engine, [PROMPT], scored_by(reward), n=2, params=PARAMS))
    return group


def by_text(prompt: Prompt, sample: Sample) -> float | Unscored:
    found = transcript(sample)
    return Unscored(reason="odd") if found == "odd" else float(len(found))


def test_rows_are_named_and_scored_as_one_episode() -> None:
    """Of its last row; the reward function is called once for each episode."""
    asked = []

    def reward(prompt: Prompt, sample: Sample) -> float:
        asked.append(sample.name)
        return by_text(prompt, sample)  # type: ignore[return-value]

    group = scored(compacted, reward)
    assert [s.name for s in group.samples] == ["p/0", "p/1", "p/1.1"]
    assert [transcript(s) for s in group.samples] == ["7", "7", "7<24"]
    assert [s.reward for s in group.samples] == [1.0, 4.0, 4.0] and sorted(asked) == ["p/0", "p/1.1"]
    assert [s.name for s in group.episodes] == ["p/0", "p/1"] and group.rewards == [1.0, 4.0]


def test_an_episode_that_cannot_be_scored_is_discarded_with_all_its_rows() -> None:
    def reward(prompt: Prompt, sample: Sample) -> float | Unscored:
        return Unscored(reason="odd") if sample.index == 1 else 1.0

    group = scored(compacted, reward)
    assert [s.name for s in group.samples] == ["p/0"] and group.discarded == {"odd": 1}


def test_the_oldest_version_is_the_oldest_of_all_rows() -> None:
    group = scored(compacted, by_text)
    first, second, third = group.samples
    old = replace(third, versions=(VersionSpan(3, 0, 3),))
    young = [replace(s, versions=(VersionSpan(5, 0, 2),)) for s in (first, second)]
    assert replace(group, samples=(*young, old)).oldest_version == 3


def test_a_lost_environment_discards_all_samples_of_its_prompt() -> None:
    async def lost(engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams) -> Rows:
        raise EnvironmentLost("no sandbox")

    group = scored(lost, by_text)
    assert not group.samples and group.discarded == {"no sandbox": 2}


def _twice(rows: list[Any]) -> list[Any]:
    """As if the second row had sampled the first turn again."""
    (second, on), first = rows
    mask = on.loss_mask.clone()
    mask[len(PROMPT.token_ids) : second.length] = True
    return [[second, replace(on, loss_mask=mask, logprobs=torch.zeros(on.length))], first]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (_twice, (2, "p/1", "loss mask")),
        (lambda rows: [[rows[0][0], rows[0][0]], rows[1]], (1, "p/1", "loss mask")),
        (lambda rows: [[rows[0][0], replace(rows[0][1], index=0)], rows[1]], (2, "p/1", "index")),
        (lambda rows: [[replace(rows[0][0], reward=1.0), rows[0][1]], rows[1]], (2, "p/1", 1.0, "None")),
        (lambda rows: [[], rows[1]], ("p", 2)),
        (lambda rows: [[rows[0][0], "7"], rows[1]], ("p", 2)),
        (lambda rows: rows[:1], ("p", "p/1", 1)),
    ],
)
def test_rows_that_cannot_be_trained_on_are_named(change: Callable[[Any], Any], facts: Facts) -> None:
    async def changed(engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams) -> Rows:
        return change(await compacted(engine, prompt, n=n, params=params))  # type: ignore[no-any-return]

    with refuses(RuntimeError, *facts):
        scored(changed, by_text)


def test_equal_answers_that_were_sampled_each_for_itself_are_no_repetition() -> None:
    """Retries of one prompt: the policy answered "7" each time."""

    async def retried(engine: RolloutEngine, prompt: Prompt, *, n: int, params: SamplingParams) -> Rows:
        (first,) = await engine.generate([prompt], n=n, params=params)
        (again,) = await engine.generate([prompt], n=n, params=params)
        return [first.samples[0], [first.samples[1], again.samples[1]]]

    group = scored(retried, by_text, "7", "7")
    assert [transcript(s) for s in group.samples] == ["7", "7", "7"]
