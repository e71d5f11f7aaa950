"""The samples of a step and the distribution of their lengths in tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from statistics import NormalDist

SPREAD = 0.7  # standard deviation of the logarithm of a length before it is cut, where only the mean is known
_KNOTS = 200


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of response lengths, as tokens at evenly spaced probabilities, ascending."""

    knots: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.knots) / len(self.knots)

    @property
    def longest(self) -> float:
        return self.knots[-1]

    def of_n(self, n: int) -> list[float]:
        """n lengths that represent the distribution, ascending: it is cut into n parts of equal probability, and the
        i-th length is the mean of the i-th part. Their mean is the distribution's."""
        size, sums = len(self.knots), [0.0, *accumulate(self.knots)]

        def below(p: float) -> float:
            at = min(int(p * size), size - 1)
            return sums[at] + (p * size - at) * self.knots[at]

        return [n / size * (below((i + 1) / n) - below(i / n)) for i in range(n)]

    def expected_longest(self, n: int) -> float:
        """The expected length of the longest of n responses: the sum over knots of the length times the probability
        that the longest falls on it."""
        size = len(self.knots)
        return sum(x * (((i + 1) / size) ** n - (i / size) ** n) for i, x in enumerate(self.knots))


@lru_cache(maxsize=64)
def lengths_with_mean(mean: float, limit: float, spread: float = SPREAD) -> Lengths:
    """Log-normal lengths, cut at `limit`, with this mean after the cut. Raises ValueError for a mean outside of
    [1, limit]."""
    if not 1 <= mean <= limit:
        raise ValueError(f"responses of {mean:g} tokens on average with a limit of {limit:g}: expected 1 to the limit")
    normal = NormalDist()
    steps = [math.exp(spread * normal.inv_cdf((i + 0.5) / _KNOTS)) for i in range(_KNOTS)]

    def cut(median: float) -> tuple[float, ...]:
        return tuple(min(limit, max(1.0, median * x)) for x in steps)

    low, high = 1e-3, limit / steps[0]
    for _ in range(80):
        middle = math.sqrt(low * high)
        if sum(cut(middle)) / _KNOTS < mean:
            low = middle
        else:
            high = middle
    return Lengths(cut(high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step's samples. `prompt`: tokens of a prompt on average; the samples of a group share theirs."""

    groups: int
    samples_per_group: int
    prompt: float
    responses: Lengths
    steps_per_rollout: int = 1
    """Optimizer steps, each on an equal share of the samples."""

    @property
    def samples(self) -> int:
        return self.groups * self.samples_per_group

    @property
    def tokens(self) -> float:
        """Tokens of the step's prompts and responses together, which the trainer computes."""
        return self.samples * (self.prompt + self.responses.mean)

    @property
    def sampled(self) -> float:
        return self.samples * self.responses.mean


@dataclass(frozen=True, slots=True)
class Packs:
    """The packs of one optimizer step on one data-parallel rank."""

    count: int
    tokens: float
    """Of one pack, on average."""
    squares: float
    """Sum of the squared lengths of a pack's samples, on average: causal attention is proportional to it."""


def packs_of(load: Workload, capacity: int, dp: int, *, multiple: int = 1, most: int = 512) -> Packs:
    """First-fit decreasing over typical samples. capacity: tokens of a pack; a rank's number of packs is rounded up to
    a multiple of `multiple`. most: samples that are packed, of which the whole is a repetition."""
    mine = load.samples / load.steps_per_rollout / dp
    typical = max(1, min(most, round(mine)))
    lengths = [min(float(capacity), load.prompt + x) for x in reversed(load.responses.of_n(typical))]
    bins = _first_fit(tuple(lengths), float(capacity))
    count = max(1, math.ceil(bins * mine / typical - 1e-9))
    count = -(-count // multiple) * multiple
    total, squares = sum(lengths) * mine / typical, sum(x * x for x in lengths) * mine / typical
    return Packs(count, total / count, squares / count)


@lru_cache(maxsize=4096)
def _first_fit(lengths: tuple[float, ...], capacity: float) -> int:
    """Bins of first-fit decreasing."""
    free: list[float] = []
    for length in lengths:
        for i, room in enumerate(free):
            if length <= room:
                free[i] = room - length
                break
        else:
            free.append(capacity - length)
    return len(free)
