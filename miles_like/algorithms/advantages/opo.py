"""The optimal reward baseline of on-policy training.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_like.algorithms.advantages.rewards import finite_rewards, per_sample
from miles_like.types import SampleGroup


def length_weighted(groups: Sequence[SampleGroup]) -> list[list[float]]:
    """For each group [G]: the reward minus the mean of the group's rewards, each weighted by the number of its sample's
    loss tokens: the baseline of least variance where a sample's squared gradient grows as its length (OPO,
    arXiv:2505.23585). Groups of equal rewards, of one sample or without a loss token get exact zeros.

    Raises ValueError for a reward that is missing or not finite.
    """
    lengths = [[sum(s.response_len for s in rows) for rows in g.rows] for g in groups]
    return [per_sample(g, _of_group(finite_rewards(g), n)) for g, n in zip(groups, lengths, strict=True)]


def _of_group(rewards: Sequence[float], lengths: Sequence[int]) -> list[float]:
    if len(set(rewards)) < 2 or not sum(lengths):
        return [0.0] * len(rewards)
    baseline = math.fsum(n * r for n, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]
