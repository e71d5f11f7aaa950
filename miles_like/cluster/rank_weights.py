"""What a publisher gets of the weights of one trainer rank: the whole stream, or its shards."""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import cached_property

from miles_like.cluster.pacing import Pacer
from miles_like.rank_protocols import RankTrainer, Signals, WeightShards
from miles_like.types import NamedTensor


class RankWeights:
    """`ShardedWeights` of one publication. together: every rank works on the stream."""

    def __init__(self, trainer: RankTrainer, pacer: Pacer, *, number: int, together: bool) -> None:
        self._trainer, self._pacer, self._together = trainer, pacer, together
        self.number = number

    def __iter__(self) -> Iterator[NamedTensor]:
        """The whole stream; collective."""
        return self._pacer.paced(self._trainer.export(), together=self._together)

    @property
    def signals(self) -> Signals:
        return self._trainer.signals

    @cached_property
    def shards(self) -> WeightShards:
        """The first use is collective."""
        return self._trainer.shards()

    def gathered(self, names: Container[str]) -> Iterator[NamedTensor]:
        """Whole tensors, of `names` and those that are gathered with one; collective."""
        return self._pacer.paced(self.shards.gathered(names), together=True)
