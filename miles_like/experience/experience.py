"""Scores sampled groups by the reference, the critic and the teachers, computes their advantages, and trains the
critic.

Letters: G samples a prompt, S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from miles_like.algorithms.advantages.remax import without_loss
from miles_like.algorithms.advantages.shuffle import shuffle_over_batch
from miles_like.algorithms.losses.value import critic_metrics
from miles_like.algorithms.truncation import mask_truncated
from miles_like.batch.packer import Packer
from miles_like.batch.unpacking import streams_of
from miles_like.protocols import Algorithm, Trainer
from miles_like.types import GREEDY, REFERENCE, RETURNS, VALUES, SampleGroup, TrainBatch
from rollout.seeds import seed_of

Advantages = Sequence[Sequence[float | Tensor]]  # [groups][G]: a number, or [S] fp32


class Scorer(Protocol):
    """The teachers of a run."""

    async def score(self, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]: ...
    def metrics(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """Metrics of groups that `score` returned."""


def with_streams(groups: Sequence[SampleGroup], name: str, streams: Sequence[Sequence[Tensor]]) -> list[SampleGroup]:
    """The groups with one more stream `name` in each sample: `streams[g][i]` [S] for `groups[g].samples[i]`."""
    return [
        replace(
            g, samples=tuple(replace(s, streams={**s.streams, name: x}) for s, x in zip(g.samples, of, strict=True))
        )
        for g, of in zip(groups, streams, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """Scores, advantages and the critic's training, each only if the algorithm needs it.

    mask_truncated: leave samples that were cut at the token limit out of the loss. shuffle_seed: permute the
    advantages of a step at random over its samples, as a control; None: do not.
    """

    algorithm: Algorithm
    packer: Packer  # of the trainer; a critic has the same layout
    trainer: Trainer
    critic: Trainer | None = None
    reference: Trainer | None = None  # ranks with the reference's weights alone; None: the trainer swaps them in
    teachers: Scorer | None = None
    mask_truncated: bool = False
    shuffle_seed: int | None = None

    async def score(self, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        """The groups with the streams that `algorithm.needs` names, that of the reference's own ranks, and those of the
        teachers.

        With GREEDY the first sample of each group has no loss. The streams are [S] per sample: log-probabilities under
        the reference's weights and values under the critic's current weights, 0 at tokens that were not sampled. Raises
        ValueError as `mask_truncated`, and the errors of the ranks and of the teachers.
        """
        if GREEDY in self.algorithm.needs:
            groups = without_loss(groups)
        if self.mask_truncated:
            groups = mask_truncated(groups, steps=self.packer.steps_per_rollout)
        given = groups
        if self.teachers is not None:  # first: it may be the turn of the servers that some of them use
            groups = await self.teachers.score(groups)
        needs, found = self.algorithm.needs, dict[str, Sequence[Sequence[Tensor]]]()
        if self.reference is not None:
            needs = needs | {REFERENCE}
        if needs & {REFERENCE, VALUES}:
            bare = _without_routes(given)
            batch = replace(self.packer, cost=None).batch(bare)
            if REFERENCE in needs:
                found[REFERENCE] = streams_of(bare, batch, await self._reference_logprobs(batch))
            if VALUES in needs:
                assert self.critic is not None, f"algorithm {self.algorithm.name!r} needs a critic, but none was passed"
                found[VALUES] = streams_of(bare, batch, await self.critic.logprobs(batch))
        for name, streams in found.items():
            groups = with_streams(groups, name, streams)
        return groups

    async def _reference_logprobs(self, batch: TrainBatch) -> Sequence[Sequence[Tensor]]:
        if self.reference is not None:
            return await self.reference.logprobs(batch)
        return await self.trainer.logprobs(batch, weights=REFERENCE)

    def advantages(self, step: int, groups: Sequence[SampleGroup]) -> Advantages:
        """Advantages of scored groups: for each sample a number, or [S] fp32, one for each of its tokens."""
        found = self.algorithm.advantages(groups)
        if self.shuffle_seed is None:
            return found
        return shuffle_over_batch(found, seed=seed_of(self.shuffle_seed, f"shuffle {step}"))

    async def learn(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """Trains the critic, if the algorithm has one, on scored groups and their returns. Returns the critic's
        `critic/...` metrics and the teachers' metrics."""
        metrics = {} if self.teachers is None else dict(self.teachers.metrics(groups))
        returns = self.algorithm.returns(groups)
        if returns is None or self.critic is None:
            return metrics
        bare = _of_values(with_streams(groups, RETURNS, returns))
        report = await self.critic.train(self.packer.steps(bare))
        return metrics | critic_metrics(report.metrics)


def _of_values(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """The groups as the critic is trained on them: without a teacher's candidates, with its two streams alone."""
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
    """Drops routing traces: the reference and the critic route on their own."""
    return [replace(g, samples=tuple(replace(s, routing=None) for s in g.samples)) for g in groups]
