"""GRPO: rewards relative to their group.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from miles_like.algorithms.advantages.rewards import relative_to_group
from miles_like.types import SampleGroup

STD_EPS = 1e-6  # verl's and slime's; equal rewards are handled before the division


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """r - mean over the group; with `normalize_std` divided by the group's standard deviation: GRPO (DeepSeekMath,
    arXiv:2402.03300, 4.1.2); without it Dr. GRPO (arXiv:2503.20783)."""

    normalize_std: bool

    def __call__(self, groups: Sequence[SampleGroup]) -> list[list[float]]:
        """For each group [G]; raises ValueError for a reward that is missing or not finite."""
        return relative_to_group(groups, partial(group_relative, normalize_std=self.normalize_std))


def group_relative(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """[G] finite rewards of one prompt -> [G] advantages.

    The standard deviation is the sample one (n - 1), as in torch.std and hence in verl, TRL and slime, so that their
    learning rates carry over. A group of equal rewards, or of one sample, gives exactly zeros.
    """
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_EPS) for c in centred]
