"""What groups are given between their rewards and their advantages, and what a critic learns of them.

Letters: G samples a prompt, S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from miles_like.algorithms.losses.value import critic_metrics
from miles_like.protocols import Algorithm, Trainer
from miles_like.types import REFERENCE, RETURNS, VALUES, SampleGroup, TrainBatch
from miles_like.unpacking import streams_of

Packed = Callable[[Sequence[SampleGroup], Sequence[Sequence[float]]], Sequence[TrainBatch]]  # with advantages


class Asked(Protocol):
    """The teachers of a run, or in tests one."""

    async def score(self, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]: ...
    def metrics(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """Of groups that were scored."""


def with_streams(groups: Sequence[SampleGroup], name: str, streams: Sequence[Sequence[Tensor]]) -> list[SampleGroup]:
    """Every sample with one stream more: `streams[g][i]` [S] of `groups[g].samples[i]`."""
    return [
        replace(
            g, samples=tuple(replace(s, streams={**s.streams, name: x}) for s, x in zip(g.samples, of, strict=True))
        )
        for g, of in zip(groups, streams, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Asks the reference, the critic and the teachers, those that the algorithm needs, about every token."""

    algorithm: Algorithm
    pack: Packed  # in one batch
    pack_steps: Packed  # a batch for each optimizer step
    trainer: Trainer
    critic: Trainer | None = None
    mask: Callable[[Sequence[SampleGroup]], Sequence[SampleGroup]] = list  # what is not to be trained, before any asks
    teachers: Asked | None = None

    async def __call__(self, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        """The same groups with the streams that `algorithm.needs` names: log-probabilities and values of each token by
        the weights of this moment, 0 where nothing was sampled. Raises what the ranks and teachers raise."""
        groups, needs = self.mask(groups), self.algorithm.needs
        found: dict[str, Sequence[Sequence[Tensor]]] = {}
        if needs & {REFERENCE, VALUES}:
            bare = _without_routes(groups)
            (batch,) = self.pack(bare, _zeros(bare))
            if REFERENCE in needs:
                found[REFERENCE] = streams_of(bare, batch, await self.trainer.logprobs(batch, weights=REFERENCE))
            if VALUES in needs:
                assert self.critic is not None, f"algorithm {self.algorithm.name!r} without its critic"
                found[VALUES] = streams_of(bare, batch, await self.critic.logprobs(batch))
        for name, streams in found.items():
            groups = with_streams(groups, name, streams)
        return groups if self.teachers is None else await self.teachers.score(groups)

    async def learn(self, step: int, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """What teachers said, as metrics; and one rollout of the critic, if there is one, on the values that it gave
        and the returns that came of them: its `critic/...`."""
        told = {} if self.teachers is None else dict(self.teachers.metrics(groups))
        returns = self.algorithm.returns(groups)
        if returns is None or self.critic is None:
            return told
        bare = _of_values(with_streams(groups, RETURNS, returns))
        report = await self.critic.train(self.pack_steps(bare, _zeros(bare)))
        return told | critic_metrics(report.metrics)


def _zeros(groups: Sequence[SampleGroup]) -> list[list[float]]:
    return [[0.0] * len(g.samples) for g in groups]


def _of_values(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """What a critic learns from: nothing that is of tokens to be chosen, a teacher's candidates least of all."""
    return [
        replace(
            g,
            samples=tuple(
                replace(s, candidates=None, streams={name: s.streams[name] for name in (VALUES, RETURNS)})
                for s in g.samples
            ),
        )
        for g in _without_routes(groups)
    ]


def _without_routes(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """Who is not the trained model chooses its own experts."""
    return [replace(g, samples=tuple(replace(s, routing=None) for s in g.samples)) for g in groups]
