"""Scores sampled groups by the reference, the critic and the teachers, computes their advantages, and trains the
critic.

Letters: G samples a prompt, S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from miles_like.algorithms.advantages.parts import with_streams
from miles_like.algorithms.advantages.remax import without_loss
from miles_like.algorithms.advantages.shuffle import shuffle_over_batch
from miles_like.algorithms.losses.value import critic_metrics
from miles_like.algorithms.truncation import mask_truncated
from miles_like.batch.packer import Advantages, Packer
from miles_like.batch.unpacking import streams_of
from miles_like.experience.token_columns import Columns, TrainerLogprobs, token_columns
from miles_like.protocols import Algorithm, Trainer
from miles_like.records import AnyBatch
from miles_like.types import GREEDY, REFERENCE, RETURNS, VALUES, SampleGroup, TrainBatch
from rollout.seeds import seed_of


class TokenValues(Protocol):
    """Where the values of the samples' tokens are: in this process, or in rollout workers."""

    async def logprobs(
        self, groups: Sequence[SampleGroup], batch: AnyBatch, ranks: Trainer, *, weights: str | None, stream: str
    ) -> Sequence[SampleGroup]:
        """The groups with the log-probs that `ranks` give as a further stream, 0 at tokens without loss. batch: of the
        groups; weights: as in `Trainer.logprobs`."""

    async def advantages(self, algorithm: Algorithm, groups: Sequence[SampleGroup]) -> Advantages:
        """As the algorithm's."""

    async def returns(self, algorithm: Algorithm, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        """The groups with the algorithm's returns as the stream RETURNS."""


class OwnValues:
    """Values in this process."""

    async def logprobs(
        self, groups: Sequence[SampleGroup], batch: AnyBatch, ranks: Trainer, *, weights: str | None, stream: str
    ) -> Sequence[SampleGroup]:
        assert isinstance(batch, TrainBatch), "of samples"
        return with_streams(groups, stream, streams_of(groups, batch, await ranks.logprobs(batch, weights=weights)))

    async def advantages(self, algorithm: Algorithm, groups: Sequence[SampleGroup]) -> Advantages:
        return algorithm.advantages(groups)

    async def returns(self, algorithm: Algorithm, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        return with_streams(groups, RETURNS, algorithm.returns(groups) or [])


class Scorer(Protocol):
    """The teachers of a run."""

    async def score(self, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]: ...
    def metrics(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """Metrics of groups that `score` returned."""


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
    values: TokenValues = field(default_factory=OwnValues)
    mask_truncated: bool = False
    shuffle_seed: int | None = None
    trainer_logprobs: TrainerLogprobs | None = None  # None: they are not written

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
        if self.teachers is not None:  # first: it may be the turn of the servers that some of them use
            groups = await self.teachers.score(groups)
        for stream, (ranks, weights) in self._asked().items():
            (batch,) = replace(self.packer, cost=None, steps_per_rollout=1).steps(groups, only=())
            groups = await self.values.logprobs(groups, batch, ranks, weights=weights, stream=stream)
        return groups

    def _asked(self) -> dict[str, tuple[Trainer, str | None]]:
        """The stream that ranks give -> these ranks, and the weights that they use."""
        out: dict[str, tuple[Trainer, str | None]] = {}
        if self.reference is not None:
            out[REFERENCE] = self.reference, None
        elif REFERENCE in self.algorithm.needs:
            out[REFERENCE] = self.trainer, REFERENCE
        if VALUES in self.algorithm.needs:
            assert self.critic is not None, f"algorithm {self.algorithm.name!r} needs a critic, but none was passed"
            out[VALUES] = self.critic, None
        return out

    async def advantages(self, step: int, groups: Sequence[SampleGroup]) -> Advantages:
        """Advantages of scored groups: for each sample a number, or [S] fp32, one for each of its tokens; None: where
        the tokens are held, their advantages are too."""
        found = await self.values.advantages(self.algorithm, groups)
        if self.shuffle_seed is None:
            return found
        return shuffle_over_batch(groups, found, seed=seed_of(self.shuffle_seed, f"shuffle {step}"))

    async def columns(self, step: int, groups: Sequence[SampleGroup], advantages: Advantages) -> list[list[Columns]]:
        """What is written of the samples' tokens (`token_columns`). Call it before the step is trained."""
        return await token_columns(step, groups, advantages, self.trainer_logprobs)

    async def learn(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """Trains the critic, if the algorithm has one, on scored groups and their returns. Returns the critic's
        `critic/...` metrics and the teachers' metrics."""
        metrics = {} if self.teachers is None else dict(self.teachers.metrics(groups))
        if VALUES not in self.algorithm.needs or self.critic is None:
            return metrics
        returned = await self.values.returns(self.algorithm, groups)
        # its head predicts no token: it gets no candidates of a teacher
        report = await self.critic.train(self.packer.steps(returned, only=(VALUES, RETURNS)))
        return metrics | critic_metrics(report.metrics)
