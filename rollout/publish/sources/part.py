"""The part of a version that one source publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from miles_like.rank_protocols import Board, WeightSources
from miles_like.types import NamedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    number: int  # of the source
    sources: WeightSources
    weights: Iterator[NamedTensor]  # its tensors, whole; not collective where it is drained
    publication: int  # the number of publications of these ranks so far, this one included
    board: Callable[[], Board]  # for the texts of the sources
    abandon: Callable[[Sequence[int]], None]  # ranks wait no longer for these sources, which do not answer
