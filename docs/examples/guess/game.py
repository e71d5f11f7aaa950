"""A guessing game: a number of 0 to 15 is to be found in three guesses, each answered by "higher" or "lower".

    miles-like train docs/examples/guess/guess.toml

A policy that does not use the answers finds at most 3 of the 16 numbers, .1875; binary search finds 7, .4375.
"""

from __future__ import annotations

import random

from miles_like.protocols import MakeEnvironment, SampleReward
from miles_like.types import Observation, Prompt, Sample

GUESSES = 3


class Game:
    """Protocol: MakeEnvironment; its instances are Environments."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.number, self.guesses, self.random = int(prompt.answer), 0, random.Random(seed)

    def __call__(self, sample: Sample, turn: str) -> Observation:
        """A turn that is no number ends the game."""
        self.guesses += 1
        guess = int(turn) if turn.isdigit() else None
        if guess is None or guess == self.number or self.guesses == GUESSES:
            return Observation(ends=True, reward=float(guess == self.number))
        return Observation(text=self.answer(guess))

    def answer(self, guess: int) -> str:
        return "higher" if guess < self.number else "lower"


class Deaf(Game):
    """The control: answers are drawn at random, so that nothing can be learnt from them."""

    def answer(self, guess: int) -> str:
        return self.random.choice(("higher", "lower"))


def lost(prompt: Prompt, sample: Sample) -> float:
    """Protocol: SampleReward. Of an episode that the game did not end: the turn's only token did not end it."""
    return 0.0


_: tuple[MakeEnvironment, MakeEnvironment, SampleReward] = Game, Deaf, lost
