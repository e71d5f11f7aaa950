"""What a run writes beside its samples: advantages and, in some steps, the trainer's log-probs of their tokens; and how
far the trainer's routers agree with their routes.

Letters: S tokens a sample, n of them sampled by the policy, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from miles_like.batch.packer import Advantages, Packer
from miles_like.batch.unpacking import shares_of, streams_of
from miles_like.protocols import TrainerRanks
from miles_like.records import AnyBatch, RecordGroup
from miles_like.types import AGREEMENT, TRAINER_LOGPROBS, Sample, SampleGroup, SharedExperts

Columns: TypeAlias = Mapping[str, float | list[float]]  # of a sample, as JSON


class HeldLogprobs(Protocol):
    """Rollout workers that hold the values of tokens."""

    async def logprobs(
        self,
        groups: Sequence[SampleGroup],
        batch: AnyBatch,
        ranks: TrainerRanks,
        *,
        weights: str | None,
        stream: str,
        replay: bool,
    ) -> Any:
        """Adds the log-probs that `ranks` give to the groups as a further stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLogprobs:
    """A forward pass of the trainer over the groups of every `every`-th step before it trains on them, at the rollout's
    temperature and, with `replay`, on the rollout's routes: with the rollout's log-probs the gap of each token. held:
    where the values of tokens are; None: in this process."""

    every: int
    ranks: TrainerRanks
    packer: Packer
    temperature: float
    replay: bool
    held: HeldLogprobs | None = None

    async def keep(self, step: int, groups: Sequence[SampleGroup]) -> None:
        """As `of`, of groups that rollout workers hold: these keep the values as the stream TRAINER_LOGPROBS."""
        if (step + 1) % self.every:
            return
        assert self.held is not None, "groups that are held"
        packer = replace(self.packer, cost=None, steps_per_rollout=1)
        (batch,) = packer.steps(groups, only=None if self.replay else ())
        await self.held.logprobs(groups, batch, self.ranks, weights=None, stream=TRAINER_LOGPROBS, replay=self.replay)

    async def of(self, step: int, groups: Sequence[SampleGroup]) -> Sequence[Sequence[Tensor]] | None:
        """For each group [S] fp32 of each sample, 0 at tokens that were not sampled; None in steps that are not due.
        Raises as `TrainerRanks.score`."""
        if (step + 1) % self.every:
            return None
        batch = replace(self.packer, cost=None, steps_per_rollout=1).batch(groups)
        scored = await self.ranks.score(batch, temperature=self.temperature, replay=self.replay)
        of_shard = {shard: found.logprobs for shard, found in reversed(scored)}  # the first rank of each shard
        return streams_of(groups, batch, [of_shard[shard] for shard in range(len(batch.grid))])


async def token_columns(
    step: int, groups: Sequence[SampleGroup], advantages: Advantages, trainer: TrainerLogprobs | None
) -> list[list[Columns]]:
    """For each group the columns of each sample: `advantages`, one number or [n]; `trainer_logprobs` [n] in the steps
    that are due. Of samples that rollout workers hold: what this process has, the advantages that are numbers; they
    write what is of tokens."""
    streams = None
    if trainer is not None and any(isinstance(group, RecordGroup) for group in groups):
        await trainer.keep(step, groups)
    elif trainer is not None:
        streams = await trainer.of(step, groups)
    out: list[list[Columns]] = []
    for g, (group, of_group) in enumerate(zip(groups, advantages, strict=True)):
        columns: list[Columns] = []
        for i, (sample, value) in enumerate(zip(group.samples, of_group, strict=True)):
            own = {} if value is None else {"advantages": _sampled(sample, value)}
            if streams is not None:
                own[TRAINER_LOGPROBS] = _sampled(sample, streams[g][i])
            columns.append(own)
        out.append(columns)
    return out


def with_agreement(
    columns: Sequence[Sequence[Columns]],
    groups: Sequence[SampleGroup],
    agreement: Sequence[Mapping[str, SharedExperts]],
) -> Sequence[Sequence[Columns]]:
    """The columns with `routing_agreement` of each sample where it was measured (`unpacking.shares_of`). columns: of
    each sample, or empty."""
    if not any(agreement):
        return columns
    of_groups = columns or [[{}] * len(g.samples) for g in groups]
    return [
        [own if share is None else {**own, AGREEMENT: share} for own, share in zip(of, shares, strict=True)]
        for of, shares in zip(of_groups, shares_of(groups, agreement), strict=True)
    ]


def _sampled(sample: Sample, values: float | Tensor) -> float | list[float]:
    if not isinstance(values, Tensor):
        return float(values)
    found: list[float] = values[sample.loss_mask].tolist()
    return found
