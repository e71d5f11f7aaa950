"""Seconds of one phase, by the terms that they are a sum of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Phase:
    """`terms`: name -> seconds, whose sum is the phase's. Where two terms overlap, only the excess of the longer is a
    term."""

    terms: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())

    @property
    def decides(self) -> str:
        """The longest term; "nothing" for a phase that takes no time."""
        return max(self.terms, key=lambda name: self.terms[name]) if self.seconds > 0 else "nothing"

    def times(self, factor: float) -> Phase:
        return Phase({name: factor * value for name, value in self.terms.items()})


NOTHING = Phase({})


def together(phases: Iterable[Phase]) -> Phase:
    """The phases one after the other: the sum of each term."""
    total: dict[str, float] = {}
    for phase in phases:
        for name, value in phase.terms.items():
            total[name] = total.get(name, 0.0) + value
    return Phase(total)
