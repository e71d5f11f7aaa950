"""Random draws of a simulation: lengths of answers, the filter's verdicts, scoring times, times of faults.

Every draw is a function of the seed, its purpose and the group's id, never of the order of events: two simulations that
differ in one setting have the same answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from miles_like.simulation.inputs.assumptions import LengthAssumptions, RewardAssumptions

Floats = NDArray[np.float64]


class Purpose(IntEnum):
    """What a stream of random numbers is for."""

    LENGTHS = 0
    FILTER = 1
    REWARD = 2
    FAULTS = 3
    EVALUATION = 4


def stream(seed: int, purpose: Purpose, number: int = 0) -> np.random.Generator:
    return np.random.default_rng([seed, int(purpose), number])


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers to one prompt. lengths: tokens of each, at least 1."""

    prompt_tokens: int
    lengths: tuple[int, ...]


class AnswerSource(Protocol):
    def draw(self, random: np.random.Generator, n: int) -> Answers:
        """`n` answers to one prompt."""

    def longest(self) -> Iterable[tuple[int, int]]:
        """(tokens of a prompt, most of an answer to it): of each prompt, or of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnAnswers:
    """Lengths of a distribution. limit: tokens at which an answer is cut off."""

    lengths: LengthAssumptions
    limit: int

    def draw(self, random: np.random.Generator, n: int) -> Answers:
        if self.lengths.prompt_tokens is None:
            raise ValueError("simulation.lengths.prompt_tokens is not set: set it")
        found = np.clip(np.rint(self._tokens(random, n)), 1, self.limit)
        return Answers(self.lengths.prompt_tokens, tuple(int(x) for x in found))

    def longest(self) -> Iterable[tuple[int, int]]:
        fixed = self.lengths.kind == "fixed" and self.lengths.mean is not None
        most = max(1, min(round(self.lengths.mean or 1.0), self.limit)) if fixed else self.limit
        return [(self.lengths.prompt_tokens or 1, most)]

    def _tokens(self, random: np.random.Generator, n: int) -> Floats:
        mean, kind, sigma = self.lengths.mean or 1.0, self.lengths.kind, self.lengths.sigma
        if kind == "exponential":
            return random.exponential(mean, n)
        if kind == "geometric":
            return random.geometric(min(1.0, 1.0 / mean), n).astype(np.float64)
        if kind == "lognormal":
            common = random.standard_normal() * np.sqrt(self.lengths.of_prompt)
            own = random.standard_normal(n) * np.sqrt(1 - self.lengths.of_prompt)
            return np.asarray(mean * np.exp(sigma * (common + own) - sigma**2 / 2))
        return np.full(n, mean)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswers:
    """Answers of groups that a run recorded, so that answers to one prompt are as alike as they were there."""

    recorded: Sequence[Answers]
    limit: int

    def draw(self, random: np.random.Generator, n: int) -> Answers:
        """A recorded group; where it has another number of answers, `n` of its lengths with replacement."""
        found = self.recorded[int(random.integers(len(self.recorded)))]
        lengths = found.lengths if len(found.lengths) == n else tuple(random.choice(found.lengths, n).tolist())
        return Answers(found.prompt_tokens, tuple(max(1, min(x, self.limit)) for x in lengths))

    def longest(self) -> Iterable[tuple[int, int]]:
        return ((group.prompt_tokens, min(max(group.lengths), self.limit)) for group in self.recorded)


def scoring_seconds(reward: RewardAssumptions, seed: int, group_id: int, n: int) -> float:
    """Until all `n` samples of a group are scored, concurrently."""
    if not reward.mean_s or reward.kind == "fixed":
        return reward.mean_s
    return float(stream(seed, Purpose.REWARD, group_id).exponential(reward.mean_s, n).max())
