"""Buckets that pass stages one after the other, with bounded buffers between the stages, in virtual time.

Every stage works on one bucket at a time and occupies a resource. Stages that name the same resource take turns in an
order that is fixed beforehand, as collectives require: the buckets of all chains in the order of their place in their
chain (first halves before second halves), and of a bucket first the earlier stage. So each time is a maximum of sums of
the given seconds: a faster stage or another buffer never makes a publication longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One kind of work on a bucket."""

    name: str
    resource: str
    buffers: int = 2
    """Buckets that may lie between the start of this stage's work on them and the end of the next stage's. 1: the two
    stages never work at once. 2: double buffering. 0: the bucket is handed over in place, and this stage is occupied
    until the next one releases it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Buckets that pass the same stages in the same order. seconds: of each bucket in each stage, [bucket][stage].

    Raises ValueError for negative buffers or seconds, and for a bucket with another number of stages."""

    stages: tuple[Stage, ...]
    seconds: Sequence[Sequence[float]]

    def __post_init__(self) -> None:
        for stage in self.stages:
            if stage.buffers < 0:
                raise ValueError(f"stage {stage.name!r} has {stage.buffers} buffers: expected 0 or more")
        for row in self.seconds:
            if len(row) != len(self.stages) or min(row, default=0.0) < 0:
                raise ValueError(f"a bucket takes {list(row)} s: expected {len(self.stages)} times of 0 or more")


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a simulation found. busy: seconds in which each resource works."""

    seconds: float
    busy: Mapping[str, float]

    @property
    def bound(self) -> str:
        """The resource that works longest; "nothing" where none does."""
        return max(self.busy, key=lambda name: self.busy[name], default="nothing")


class _Progress:
    """Times of one chain so far."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.released: list[list[float]] = [[] for _ in chain.stages]  # [stage][bucket]

    def advance(self, free: dict[str, float], busy: dict[str, float]) -> float:
        """Passes the next bucket through all stages; returns the time of its end."""
        stages, at = self.chain.stages, len(self.released[0])
        ends: list[float] = []
        for s, (stage, seconds) in enumerate(zip(stages, self.chain.seconds[at], strict=True)):
            start = ends[-1] if ends else 0.0
            if at:
                start = max(start, self.released[s][at - 1])
            if s + 1 < len(stages) and 0 < stage.buffers <= at:
                start = max(start, self.released[s + 1][at - stage.buffers])
            if seconds > 0:  # work that takes no time takes no turn
                start = max(start, free.get(stage.resource, 0.0))
                free[stage.resource] = start + seconds
                busy[stage.resource] = busy.get(stage.resource, 0.0) + seconds
            ends.append(start + seconds)
        released = ends[-1]
        for s in reversed(range(len(stages))):
            released = released if stages[s].buffers == 0 and s + 1 < len(stages) else ends[s]
            self.released[s].append(released)
        return ends[-1]


def simulate(chains: Sequence[Chain]) -> Timeline:
    """All chains from time 0 until the last bucket has passed the last stage."""
    turns = sorted(
        ((i + 1) / len(chain.seconds), c) for c, chain in enumerate(chains) for i in range(len(chain.seconds))
    )
    progress = [_Progress(chain) for chain in chains]
    free: dict[str, float] = {}
    busy: dict[str, float] = {}
    end = 0.0
    for _, c in turns:
        end = max(end, progress[c].advance(free, busy))
    return Timeline(end, busy)


def one_after_the_other(timelines: Iterable[Timeline]) -> Timeline:
    seconds, busy = 0.0, dict[str, float]()
    for timeline in timelines:
        seconds += timeline.seconds
        for name, value in timeline.busy.items():
            busy[name] = busy.get(name, 0.0) + value
    return Timeline(seconds, busy)
