"""What is written of a sample's tokens: advantages, in the steps that are due the trainer's log-probs; and its routes.

Why it must hold: a token that shows the values of another one hides the cause of a mismatch.
The trainer is a stand-in whose log-prob of a token is its id. Not covered: that ranks compute them, tests/e2e.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch

from miles_like.batch.packer import Packer
from miles_like.experience.token_columns import TrainerLogprobs, token_columns, with_agreement
from miles_like.protocols import TrainerRanks
from miles_like.types import SampleGroup, Scored, SharedExperts, TrainBatch
from tests.support.made_samples import group, sample

DP = 2


class Ranks:
    """Two ranks of each shard."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    async def score(self, batch: TrainBatch, **how: Any) -> list[tuple[int, Scored]]:
        self.asked.append(how)
        found = [Scored(logprobs=[m.labels.float() * m.loss_mask for m in row], routes=()) for row in batch.grid]
        return [(shard, found[shard]) for shard in (0, 0, 1, 1)]


def groups() -> list[SampleGroup]:
    made = [
        sample(f"p{g}", i, response_len=2 + g + i, first_token=100 * g + 10 * i) for g in range(3) for i in range(2)
    ]
    made[1] = sample("p0", 1, response_len=0)
    return [group(made[i : i + 2]) for i in (0, 2, 4)]


def columns(step: int, advantages: Any, ranks: Ranks) -> list[list[Any]]:
    trainer = TrainerLogprobs(
        every=4,
        ranks=cast(TrainerRanks, ranks),
        packer=Packer(dp_size=DP, max_tokens=16, replayed=False, steps_per_rollout=3),
        temperature=0.7,
        replay=True,
    )
    return cast(list[list[Any]], asyncio.run(token_columns(step, groups(), advantages, trainer)))


def test_each_token_has_its_own_value() -> None:
    """Of packs over two shards, whatever the number of optimizer steps; a sample without a token has none."""
    ranks = Ranks()
    found = columns(7, [[1.0, -1.0]] * 3, ranks)
    for of, made in zip(found, groups(), strict=True):
        for own, s in zip(of, made.samples, strict=True):
            assert own["trainer_logprobs"] == s.token_ids[s.loss_mask].tolist()
    assert ranks.asked == [{"temperature": 0.7, "replay": True}]
    assert found[0][1] == {"advantages": -1.0, "trainer_logprobs": []}


@pytest.mark.parametrize("step", [0, 2, 4])
def test_only_every_fourth_step_is_scored(step: int) -> None:
    ranks = Ranks()
    assert columns(step, [[1.0, -1.0]] * 3, ranks)[2] == [{"advantages": 1.0}, {"advantages": -1.0}] and not ranks.asked


def test_advantages_of_tokens_are_those_of_sampled_ones() -> None:
    of_tokens = [[torch.arange(len(s.token_ids)).float() for s in g.samples] for g in groups()]
    found = columns(0, [of_tokens[0], of_tokens[1], [None, 2.0]], Ranks())
    assert found[1][0] == {"advantages": [2.0, 3.0, 4.0]} and found[2] == [{}, {"advantages": 2.0}]


def test_each_sample_has_the_agreement_of_its_own_optimizer_step() -> None:
    """A prompt that comes twice in a rollout has one name in each of its steps, and two in one."""
    twice = [group([sample("p", i, response_len=2) for i in range(2)]) for _ in range(2)]
    given = [[{"advantages": 1.0}, {"advantages": 2.0}]] * 2
    apart = with_agreement(given, twice, [{"p/0": SharedExperts(3, 4)}, {"p/0": SharedExperts(1, 4)}])
    assert apart == [
        [{"advantages": 1.0, "routing_agreement": 0.75}, {"advantages": 2.0}],
        [{"advantages": 1.0, "routing_agreement": 0.25}, {"advantages": 2.0}],
    ]
    together = with_agreement((), twice, [{"p/1": SharedExperts(0, 4), "p/1#2": SharedExperts(4, 4)}])
    assert together == [[{}, {"routing_agreement": 0.0}], [{}, {"routing_agreement": 1.0}]]
    assert with_agreement(given, twice, [{}]) is given, "of a dense model"
