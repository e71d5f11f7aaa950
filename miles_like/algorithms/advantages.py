"""Rewards -> advantages.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

STD_EPS = 1e-6  # verl's and slime's; only keeps the quotient finite, a group of equal rewards is answered before it


def group_relative(rewards: Sequence[float], *, normalize_std: bool) -> list[float]:
    """[G] rewards of one prompt -> [G] advantages: r - mean, divided by the group's standard deviation when asked.

    GRPO (DeepSeekMath, arXiv:2402.03300, 4.1.2); without the division, Dr. GRPO (arXiv:2503.20783). The deviation is
    the sample one (n - 1), as in torch.std and hence in verl, TRL and slime, so that their learning rates carry over.
    A group of equal rewards, or of one sample, says nothing about which answer was better: all zeros, exactly.
    Raises ValueError for a reward that is not finite.
    """
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"rewards {list(rewards)} are not all finite: check the reward function")
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    if not normalize_std:
        return centred
    std = math.sqrt(math.fsum(c * c for c in centred) / (len(rewards) - 1))
    return [c / (std + STD_EPS) for c in centred]


def shuffle_over_batch(advantages: Sequence[Sequence[float]], *, seed: int) -> list[list[float]]:
    """The same advantages dealt out at random over all samples of the batch: a control whose gradient is noise.

    Groups keep their sizes; the same seed deals the same way. Give a different seed each step.
    """
    values = [a for group in advantages for a in group]
    random.Random(seed).shuffle(values)
    dealt = iter(values)
    return [[next(dealt) for _ in group] for group in advantages]
