"""What reference, critic and teachers say of tokens reaches the samples it is about, and what a critic learns.

Not covered: the ranks' arithmetic (tests/laws, tests/megatron_bridge).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.algorithms.advantages.parts import with_streams
from miles_like.batch.packer import Packer
from miles_like.experience.experience import Experience
from miles_like.types import (
    REFERENCE,
    RETURNS,
    TEACHER,
    TEACHER_CANDIDATES,
    VALUES,
    Finish,
    SampleGroup,
    StepReport,
    TrainBatch,
)
from tests.support.made_samples import group, sample
from tests.support.refusals import refuses


class Ranks:
    """Says of every label its token id times `factor`, and remembers what it is asked and trains."""

    def __init__(self, factor: float) -> None:
        self.factor, self.asked, self.trained = factor, list[str | None](), list[TrainBatch]()

    async def logprobs(self, batch: TrainBatch, *, weights: str | None = None) -> list[list[Tensor]]:
        self.asked.append(weights)
        assert all(m.routing is None and not m.streams for row in batch.grid for m in row)
        return [[m.labels * self.factor for m in row] for row in batch.grid]

    async def train(self, batches: Sequence[TrainBatch]) -> StepReport:
        self.trained += batches
        return StepReport(
            version=1, metrics={"critic/loss": 2.0, "train/grad_norm": 3.0, "train/lr": 0.1, "train/x": 1}
        )


class Asks:
    """An algorithm that needs `needs`; its returns are twice the values."""

    name = "asks"

    def __init__(self, *needs: str) -> None:
        self.needs = frozenset(needs)

    def returns(self, groups: Sequence[SampleGroup]) -> list[list[Tensor]] | None:
        return [[2 * s.streams[VALUES] for s in g.samples] for g in groups] if VALUES in self.needs else None


def experience(algorithm: Asks, **more: Any) -> Any:
    packer = Packer(dp_size=2, max_tokens=64, steps_per_rollout=2)
    return Experience(algorithm=algorithm, packer=packer, **{"trainer": Ranks(1.0)} | more)


def groups() -> list[SampleGroup]:
    """The same prompt twice, as where an epoch ends, and samples of unequal length."""
    made = [sample("p", 0, routing=True), sample("p", 1, routing=True)]
    longer = [sample("q", i, response_len=7, routing=True) for i in range(2)]
    return [group(made), group(longer), group(made), group(longer)]


def stream(s: Any, factor: float) -> Tensor:
    return torch.where(s.loss_mask, s.token_ids * factor, 0.0)


def test_every_sample_gets_what_is_said_of_its_own_tokens() -> None:
    trainer, critic = Ranks(-0.5), Ranks(3.0)
    done = asyncio.run(experience(Asks(REFERENCE, VALUES), trainer=trainer, critic=critic).score(groups()))
    assert trainer.asked == [REFERENCE] and critic.asked == [None]
    for before, after in zip(groups(), done, strict=True):
        assert after.prompt == before.prompt
        for s in after.samples:
            assert torch.equal(s.streams[REFERENCE], stream(s, -0.5))
            assert torch.equal(s.streams[VALUES], stream(s, 3.0))
            assert s.routing is not None  # of the trained model, which replays them


@pytest.mark.parametrize("needs", [(), (REFERENCE,)])
def test_ranks_of_the_reference_are_asked_in_place_of_the_trainer(needs: tuple[str, ...]) -> None:
    """Also where the trainer's loss alone uses the stream, and the algorithm does not."""
    trainer, reference = Ranks(-0.5), Ranks(2.0)
    done = asyncio.run(experience(Asks(*needs), trainer=trainer, reference=reference).score(groups()))
    assert trainer.asked == [] and reference.asked == [None]
    assert all(torch.equal(s.streams[REFERENCE], stream(s, 2.0)) for g in done for s in g.samples)


def test_nobody_is_asked_who_is_not_needed() -> None:
    trainer = Ranks(1.0)
    wanted = groups()
    done = asyncio.run(experience(Asks(), trainer=trainer).score(wanted))
    assert trainer.asked == [] and [list(s.streams) for g in done for s in g.samples] == [[]] * 8
    assert asyncio.run(experience(Asks()).learn(done)) == {}


def test_masks_come_first_then_teachers_then_the_ranks() -> None:
    """Where servers and trainer take turns, a teacher on the rollout's servers would otherwise cost two more changes.
    The ranks are sent nothing of the teachers."""
    trainer = Ranks(1.0)

    class Teacher:
        async def score(self, given: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
            assert not trainer.asked and not any(s.loss_mask.any() for s in given[0].samples)
            return with_streams(given, TEACHER, [[torch.ones(len(s.token_ids)) for s in g.samples] for g in given])

        def metrics(self, given: Sequence[SampleGroup]) -> dict[str, float]:
            return {"distill/tokens": float(sum(s.streams[TEACHER].sum() for g in given for s in g.samples))}

    given = groups()
    cut = tuple(dataclasses.replace(s, finish=Finish.LENGTH) for s in given[0].samples)
    asked = experience(Asks(REFERENCE), mask_truncated=True, teachers=Teacher(), trainer=trainer)
    done = asyncio.run(asked.score([dataclasses.replace(given[0], samples=cut), *given[1:]]))
    assert asyncio.run(asked.learn(done)) == {"distill/tokens": sum(len(s.token_ids) for g in done for s in g.samples)}
    assert all(not s.loss_mask.any() and not s.streams[REFERENCE].any() for s in done[0].samples)
    assert all(s.streams[REFERENCE].any() and TEACHER in s.streams for g in done[1:] for s in g.samples)


def test_a_critic_learns_the_returns_of_what_it_said_before_in_as_many_steps_as_the_policy() -> None:
    critic = Ranks(1.0)
    asked = experience(Asks(VALUES), critic=critic)
    done = asyncio.run(asked.score(groups()))
    assert asyncio.run(asked.learn(done)) == {"critic/loss": 2.0, "critic/grad_norm": 3.0, "critic/lr": 0.1}
    assert len(critic.trained) == 2
    for batch in critic.trained:
        for m in (m for row in batch.grid for m in row):
            assert torch.equal(m.streams[RETURNS], 2 * m.streams[VALUES])
            assert torch.equal(m.streams[VALUES][m.loss_mask], m.labels[m.loss_mask].float())


def test_a_critic_is_sent_nothing_of_tokens_to_be_chosen() -> None:
    """Its head predicts none: a teacher's candidates would be refused by its ranks."""
    critic = Ranks(1.0)
    asked = experience(Asks(VALUES), critic=critic)
    done = asyncio.run(asked.score(groups()))

    def with_teacher(s: Any) -> Any:
        n = len(s.token_ids)
        of_others = {TEACHER: torch.ones(n), TEACHER_CANDIDATES: torch.ones(n, 4)}
        return dataclasses.replace(s, candidates=torch.ones(n, 4).long(), streams={**s.streams, **of_others})

    taught = [dataclasses.replace(g, samples=tuple(map(with_teacher, g.samples))) for g in done]
    asyncio.run(asked.learn(taught))
    micros = [m for batch in critic.trained for row in batch.grid for m in row]
    assert micros and all(m.candidates is None and set(m.streams) == {VALUES, RETURNS} for m in micros)


def test_an_algorithm_without_its_critic_is_our_own_mistake() -> None:
    with refuses(AssertionError, "asks"):
        asyncio.run(experience(Asks(VALUES)).score(groups()))
