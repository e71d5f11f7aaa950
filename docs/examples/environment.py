"""A custom environment: the policy guesses a number and is answered "higher" or "lower" until it is right.

    [rollout]
    environment = "./environment.py:Hints"   # relative to the configuration; or, installed, my_package.games:Hints
    max_turns = 4                            # how often the policy speaks
    max_new_tokens = 8                       # in each turn
    max_episode_tokens = 64                  # after the prompt, what the environment says included

One `Hints` is made for each episode, so it may keep what it needs between turns. What it says is put after the policy's
turn as it is, tokenized, and is never under loss: write the marks of your model's chat template around it, if it has
one. A policy that does not end its turn, or guesses `max_turns` times, is cut: the run's reward scores what there is.
"""

from __future__ import annotations

import random

from miles_like.protocols import MakeEnvironment
from miles_like.types import Observation, Prompt, Sample


class Hints:
    """Protocol: MakeEnvironment; its instances are Environments."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.answer = float(prompt.answer)
        self.guesses = 0
        self.random = random.Random(seed)  # all randomness from here: the run can then be repeated

    async def __call__(self, sample: Sample, reply: str) -> Observation:
        """`reply` is the policy's last turn; `sample` the episode so far. A function without `async` will do where it
        waits for nothing. An exception ends the run: what a policy may say must not raise."""
        self.guesses += 1
        try:
            guess = float(reply)
        except ValueError:
            return Observation(text=self.random.choice(("? ", "a number: ")))
        if guess == self.answer:
            return Observation(ends=True, reward=1.0 / self.guesses)  # without a reward the run's own is asked
        return Observation(text="higher: " if guess < self.answer else "lower: ")


_: MakeEnvironment = Hints  # mypy holds it to its Protocol here
