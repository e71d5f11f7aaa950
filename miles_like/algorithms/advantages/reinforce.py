"""REINFORCE: the reward as the advantage.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from miles_like.algorithms.advantages.rewards import finite_rewards, per_sample
from miles_like.types import SampleGroup


@dataclass(frozen=True, slots=True)
class Reinforce:
    """The reward (Williams 1992); with `batch_baseline` minus the mean reward of all samples of the rollout."""

    batch_baseline: bool

    def __call__(self, groups: Sequence[SampleGroup]) -> list[list[float]]:
        """For each group [G]; raises ValueError for a reward that is missing or not finite."""
        rewards = [finite_rewards(group) for group in groups]
        flat = [r for of_group in rewards for r in of_group]
        baseline = math.fsum(flat) / len(flat) if self.batch_baseline and flat else 0.0
        return [per_sample(g, [r - baseline for r in of]) for g, of in zip(groups, rewards, strict=True)]
