"""The packing settings of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from miles_like.batch.bins import Cost
from miles_like.batch.packing import pack, plan_records
from miles_like.batch.plan import PlanSettings
from miles_like.records import AnyBatch, PlannedBatch, RecordGroup
from miles_like.types import Aggregation, SampleGroup, TrainBatch

# [groups][samples]: a number, or [S] fp32; None: those of the tokens are held where these are
Advantages = Sequence[Sequence[float | Tensor | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packer:
    """The arguments of `pack` that do not change from step to step, and the number of steps a rollout is split into.

    `advantages=None` stands for 0.0 for every sample: for forward passes, and for losses that use no advantages. Every
    method raises ValueError as `pack` does.
    """

    dp_size: int
    max_tokens: int
    micro_multiple: int = 1
    cost: Cost | None = None
    replayed: bool = True
    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    constant: int | None = None
    steps_per_rollout: int = 1

    def batch(
        self, groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float | Tensor]] | None = None
    ) -> TrainBatch:
        """All groups as one batch."""
        return self._packed(groups, advantages, together=False)

    def steps(
        self,
        groups: Sequence[SampleGroup],
        advantages: Advantages | None = None,
        *,
        only: Sequence[str] | None = None,
    ) -> Sequence[AnyBatch]:
        """A batch for each of `steps_per_rollout` optimizer steps: the first len(groups) / steps_per_rollout groups in
        the order given, then the next; of records, batches that the ranks fill. only: for a model that routes on its
        own: with these streams alone, without routes and candidates. Raises ValueError when the groups do not divide
        into that many steps."""
        count = self.steps_per_rollout
        if count < 1 or len(groups) % count:
            raise ValueError(
                f"{len(groups)} groups are not divisible into {count} mini-batches: change train.steps_per_rollout"
            )
        given = _zeros(groups) if advantages is None else advantages
        n, held = len(groups) // count, any(isinstance(g, RecordGroup) for g in groups)
        make: Callable[..., AnyBatch] = partial(self._planned, only=only) if held else self.batch
        own = groups if held or only is None else [_only(g, only) for g in groups]
        return [make(own[i : i + n], given[i : i + n]) for i in range(0, len(groups), n)]

    def examples(self, groups: Sequence[SampleGroup]) -> TrainBatch:
        """Given answers as one batch; the samples of a group stay in one micro-batch, as a loss over pairs needs."""
        return self._packed(groups, None, together=True)

    def _planned(
        self, groups: Sequence[SampleGroup], advantages: Advantages, *, only: Sequence[str] | None
    ) -> PlannedBatch:
        how = PlanSettings(
            dp_size=self.dp_size,
            max_tokens=self.max_tokens,
            micro_multiple=self.micro_multiple,
            cost=self.cost,
            aggregation=self.aggregation,
            constant=self.constant,
        )
        return plan_records(groups, advantages, how, replayed=self.replayed, only=only)

    def _packed(
        self, groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float | Tensor]] | None, *, together: bool
    ) -> TrainBatch:
        return pack(
            groups,
            _zeros(groups) if advantages is None else advantages,
            dp_size=self.dp_size,
            max_tokens=self.max_tokens,
            micro_multiple=self.micro_multiple,
            cost=self.cost,
            replayed=self.replayed,
            aggregation=self.aggregation,
            constant=self.constant,
            together=together,
        )


def _zeros(groups: Sequence[SampleGroup]) -> list[list[float]]:
    return [[0.0] * len(g.samples) for g in groups]


def _only(group: SampleGroup, streams: Sequence[str]) -> SampleGroup:
    samples = (
        replace(s, streams={name: s.streams[name] for name in streams}, routing=None, candidates=None)
        for s in group.samples
    )
    return replace(group, samples=tuple(samples))
