"""Samples whose values of tokens another process holds, and batches of them that are not filled yet.

Letters: G samples a prompt, N samples a pack.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from miles_like.types import Sample, SampleGroup, TrainBatch
from routing_replay.trace import RoutingTrace


class _Elsewhere:
    """In place of values that this process does not hold."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            f"{name}: the values of this sample's tokens are in a rollout worker, which this process does not read; a "
            "function that reads them needs rollout.workers = 0"
        )

    def __len__(self) -> int:
        return int(self.__getattr__("length"))

    def __getitem__(self, key: object) -> Any:
        return self.__getattr__("items")

    def __reduce__(self) -> str:
        return "ELSEWHERE"


ELSEWHERE: Any = _Elsewhere()


class SpanLoss(NamedTuple):
    """The loss tokens of a version span. Places are counted as those of VersionSpan."""

    first: int  # place of the first one; meaningless where there is none
    tokens: int
    turns: int  # stretches of loss tokens that begin in the span, as seen without the tokens before it
    joins: bool  # the first stretch goes on from the span before


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleRecord(Sample):
    """A sample whose values of tokens are held by a rollout worker: what the loop decides from. Reading the values
    raises RuntimeError."""

    token_ids: Tensor = field(init=False, repr=False, default=ELSEWHERE)
    loss_mask: Tensor = field(init=False, repr=False, default=ELSEWHERE)
    logprobs: Tensor = field(init=False, repr=False, default=ELSEWHERE)
    routing: RoutingTrace | None = field(init=False, repr=False, default=ELSEWHERE)
    text: str = field(init=False, repr=False, default=ELSEWHERE)
    streams: Mapping[str, Tensor] = field(init=False, repr=False, default=ELSEWHERE)
    candidates: Tensor | None = field(init=False, repr=False, default=ELSEWHERE)
    length: int
    response_len: int
    turns: int
    holder: int  # number of the worker
    key: int  # of the sample's group there
    checksum: int  # CRC-32 of tokens, loss mask and log-probs, as they were sampled
    losses: tuple[SpanLoss, ...]  # of each of `versions`
    oldest: int = 0  # tokens of older weight versions have no loss (loop.old_tokens)

    def __post_init__(self) -> None:
        """The worker has checked the values."""

    def without_loss(self) -> SampleRecord:
        """A sample without a loss token is never packed, so that its values need not change."""
        return replace(self, response_len=0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordGroup(SampleGroup):
    """A group of records."""

    samples: tuple[SampleRecord, ...]
    refused: str | None = None  # why the run's filter discards the group; None: it is worth training


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedMicroBatch:
    """A micro-batch of N samples that is not filled yet: what its rank computes, without the values of tokens."""

    samples: tuple[str, ...]  # [N] unique names, as in MicroBatch
    advantages: tuple[float | None, ...]  # [N], the same at each token of a sample; None: the holder has the tokens'
    weights: tuple[float, ...] | None  # [N], the same at each token of a sample; None: 1 each
    filler: bool = False  # an empty cell: the first token of its one sample, without loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedBatch:
    """One optimizer step whose micro-batches the ranks fill."""

    grid: tuple[tuple[PlannedMicroBatch, ...], ...]  # [dp][micro]
    loss_tokens: int  # as of TrainBatch
    versions: tuple[int, int]  # as of TrainBatch
    records: Mapping[str, SampleRecord]  # by the unique names in the grid
    replayed: bool  # training uses the routes, so their weight versions are checked
    # streams that its ranks get, without routes and candidates; None: with all that the holders have
    only: tuple[str, ...] | None = None


AnyBatch: TypeAlias = TrainBatch | PlannedBatch


class ColumnsLostError(RuntimeError):
    """A rollout worker has ended or lost values of samples that it held. Nothing was computed from them."""

    def __init__(self, why: str, lost: Collection[tuple[int, int]]) -> None:
        """lost: (holder, key) of the groups whose values are gone."""
        super().__init__(why)
        self.lost = frozenset(lost)

    def has_lost(self, group: SampleGroup) -> bool:
        return any(isinstance(s, SampleRecord) and (s.holder, s.key) in self.lost for s in group.samples)

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnsLostError, (str(self), self.lost)
