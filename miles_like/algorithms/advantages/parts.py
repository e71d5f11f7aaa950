"""Advantages in parts, so that the groups of a rollout may be in several processes.

measure  where the values of tokens are, of each group alone: numbers of its samples, and streams that stay there
decide   from rewards, lengths and these numbers of all samples: numbers of each sample
place    where the values are: from them a sample's advantages

How the groups are divided changes no bit of the result.

Letters: G samples a prompt, S tokens a sample, R loss tokens of all samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from miles_like.algorithms.advantages.tokens import Moments, Tokens, Whitening
from miles_like.protocols import AdvantageFn, Numbers
from miles_like.types import ADVANTAGES, SampleGroup

Placed = Sequence[Sequence[float | Tensor]]  # [groups][G]: a number, or [S] fp32


class InParts(ABC):
    """An AdvantageFn of parts."""

    measures: ClassVar[bool] = True  # without it `measure` is not called, and `decide` gets no numbers
    places: ClassVar[bool] = True  # without it each sample's one number is its advantage

    @abstractmethod
    def measure(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], Sequence[Sequence[Numbers]]]:
        """The groups with the streams that `place` needs, and for each group [G]. Raises as `AdvantageFn`."""

    @abstractmethod
    def decide(
        self, groups: Sequence[SampleGroup], numbers: Sequence[Sequence[Numbers]]
    ) -> Sequence[Sequence[Numbers]]:
        """For each group [G]. Raises as `AdvantageFn`."""

    @abstractmethod
    def place(self, groups: Sequence[SampleGroup], decided: Sequence[Sequence[Numbers]]) -> Placed:
        """For each group [G]: a number, or [S] fp32. groups: as `measure` returned them."""

    def __call__(self, groups: Sequence[SampleGroup]) -> Placed:
        measured, numbers = self.measure(groups) if self.measures else (groups, [])
        return self.place(measured, self.decide(groups, numbers))


@dataclass(frozen=True, slots=True)
class OfSamples(InParts):
    """A function of rewards and lengths alone."""

    advantage: AdvantageFn
    measures: ClassVar[bool] = False
    places: ClassVar[bool] = False

    def measure(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], Sequence[Sequence[Numbers]]]:
        return groups, [[() for _ in g.samples] for g in groups]

    def decide(
        self, groups: Sequence[SampleGroup], numbers: Sequence[Sequence[Numbers]]
    ) -> Sequence[Sequence[Numbers]]:
        return [[(float(a),) for a in of_group] for of_group in self.advantage(groups)]

    def place(self, groups: Sequence[SampleGroup], decided: Sequence[Sequence[Numbers]]) -> Placed:
        return [[number for (number,) in of_group] for of_group in decided]


class OfTokens(InParts):
    """Estimates of tokens from their own group; with `whitened`, whitened over all loss tokens of the rollout."""

    whitened: ClassVar[bool] = True

    @abstractmethod
    def estimate(self, tokens: Tokens) -> Tensor:
        """[R] fp64. Raises as `AdvantageFn`."""

    def measure(self, groups: Sequence[SampleGroup]) -> tuple[Sequence[SampleGroup], Sequence[Sequence[Numbers]]]:
        tokens = Tokens.of(groups)
        values = self.estimate(tokens)
        numbers: list[list[Numbers]] = [[(*m,) for m in of_group] for of_group in tokens.moments(values)]
        return with_streams(groups, ADVANTAGES, tokens.by_sample(values, torch.float64)), numbers

    def decide(
        self, groups: Sequence[SampleGroup], numbers: Sequence[Sequence[Numbers]]
    ) -> Sequence[Sequence[Numbers]]:
        how = self._whitening([Moments(*m) for of_group in numbers for m in of_group])
        return [[(*how,) for _ in g.samples] for g in groups]

    def place(self, groups: Sequence[SampleGroup], decided: Sequence[Sequence[Numbers]]) -> Placed:
        tokens = Tokens.of(groups)
        how = next((Whitening(*numbers) for of_group in decided for numbers in of_group), Whitening(0.0, 1.0))
        return tokens.by_sample(how.of_values(tokens.stream(ADVANTAGES)))

    def __call__(self, groups: Sequence[SampleGroup]) -> Placed:
        """The three parts at once, without streams in between."""
        tokens = Tokens.of(groups)
        values = self.estimate(tokens)
        how = self._whitening([m for of_group in tokens.moments(values) for m in of_group]) if self.whitened else None
        return tokens.by_sample(values if how is None else how.of_values(values))

    def _whitening(self, moments: Sequence[Moments]) -> Whitening:
        return Whitening.of(moments) if self.whitened else Whitening(0.0, 1.0)


def with_streams(groups: Sequence[SampleGroup], name: str, streams: Sequence[Sequence[Tensor]]) -> list[SampleGroup]:
    """The groups with one more stream `name` in each sample: `streams[g][i]` [S] for `groups[g].samples[i]`."""
    return [
        replace(
            g, samples=tuple(replace(s, streams={**s.streams, name: x}) for s, x in zip(g.samples, of, strict=True))
        )
        for g, of in zip(groups, streams, strict=True)
    ]
