"""Every step trains as many groups as it says: what is left out is replaced, or the run ends.

Not covered: what a filter or a reward decides (tests of theirs).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from miles_like.buffer import DataBuffer
from miles_like.rounds import SURPLUS, UNSCORED, Produced, Rounds
from miles_like.types import Prompt, SampleGroup
from tests.miles_like.made_samples import group, sample


class Source:
    """Prompt i is answered with two samples of reward `rewards(i)`."""

    def __init__(self, rewards: Any, **how: Any) -> None:
        self.next, self.rewards, self.asked = 0, rewards, list[tuple[int, int, list[str]]]()
        self.buffer = DataBuffer(max_staleness=0)
        self.rounds = Rounds(buffer=self.buffer, next_prompts=self.deal, rollout=self.rollout, **how)

    def deal(self, n: int) -> list[Prompt]:
        self.next += n
        return [Prompt(id=str(i), token_ids=(1,), answer="") for i in range(self.next - n, self.next)]

    async def rollout(self, step: int, number: int, prompts: Sequence[Prompt]) -> list[SampleGroup]:
        self.asked.append((step, number, [p.id for p in prompts]))
        return [self.answered(p) for p in prompts]

    def answered(self, prompt: Prompt) -> SampleGroup:
        rewards = self.rewards(int(prompt.id))
        kept = [dataclasses.replace(sample(prompt.id, i), reward=r) for i, r in enumerate(rewards) if r is not None]
        lost = sum(r is None for r in rewards)
        made = group(kept) if kept else SampleGroup(prompt=prompt, samples=())
        return dataclasses.replace(made, prompt=prompt, discarded={"timed out": lost} if lost else {})

    def run(self, step: int = 0) -> tuple[Produced, list[str]]:
        async def go() -> tuple[Produced, list[str]]:
            made = await self.rounds.produce(step)
            taken = await self.buffer.take(made.groups, version=0)
            return made, [g.prompt.id for g in taken]

        return asyncio.run(asyncio.wait_for(go(), 10))


def equal(group: SampleGroup) -> str | None:
    return "equal rewards" if len(set(group.rewards)) < 2 else None


def test_what_a_filter_leaves_out_is_replaced_until_the_step_is_whole() -> None:
    """Of every three prompts one has equal rewards: groups come in the order admitted, none twice. The second round
    samples as many prompts as fill the step at the share kept so far, and what is too much is not trained."""
    source = Source(lambda i: [0.0, float(i % 3 != 0)], groups=4, refuse=equal, max_rounds=5, dealt=10)
    made, ids = source.run(7)
    assert ids == ["1", "2", "4", "5"]
    assert source.asked == [(7, 0, ["0", "1", "2", "3"]), (7, 1, ["4", "5", "6", "7"])]
    assert made.dealt == 18 and source.buffer.dropped == {"equal rewards": 3, SURPLUS: 1}
    assert made.metrics["rollout/rounds"] == 2 and made.metrics["rollout/filtered_frac"] == pytest.approx(3 / 8)
    assert made.metrics["rollout/tokens"] == 16 * int(sample("p", 0).loss_mask.sum())


def test_one_group_in_eight_is_enough_for_ten_rounds() -> None:
    """Nobody waits for a last group one prompt at a time."""
    source = Source(lambda i: [0.0, float(i % 8 == 7)], groups=64, refuse=equal, max_rounds=10)
    made, ids = source.run()
    assert ids == [str(8 * i + 7) for i in range(64)] and made.metrics["rollout/rounds"] == 8


def test_a_group_without_a_scored_sample_is_replaced_and_a_group_with_one_is_kept() -> None:
    """Nobody made its reward a 0."""
    source = Source(lambda i: [None, None] if i == 0 else [1.0, None], groups=2, max_rounds=2)
    made, ids = source.run()
    assert ids == ["1", "2"] and source.buffer.dropped == {f"{UNSCORED}: timed out": 1, SURPLUS: 1}
    assert made.metrics["rollout/discarded_frac"] == pytest.approx(5 / 8)


def test_a_step_that_stays_too_small_ends_the_run_with_the_numbers() -> None:
    source = Source(lambda i: [1.0, 1.0], groups=3, refuse=equal, max_rounds=2)
    said = r"step 5: 0 of 3 groups after 2 rounds of sampling, 6 were left out \(6 equal rewards\): raise rollout.max"
    with pytest.raises(RuntimeError, match=said):
        source.run(5)
    assert source.next == 6
