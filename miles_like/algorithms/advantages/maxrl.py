"""Maximum likelihood reinforcement learning.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_like.algorithms.advantages.rewards import relative_to_group
from miles_like.types import SampleGroup


def over_mean(groups: Sequence[SampleGroup]) -> list[list[float]]:
    """For each group [G]: (r - mean) / mean of the group, 0 if no answer is right (MaxRL, arXiv:2602.02710, algorithm
    1; without its 1 / G, as in its authors' code: the aggregation takes the mean).

    With rewards of 0 and 1 the group's mean of advantage times score is the mean score of the right answers minus that
    of all: it estimates the gradient of log p, p the probability of a right answer, expanded to order G in 1 - p. So a
    prompt has weight 1 / p, where GRPO's standard deviation gives 1 / sqrt(p (1 - p)). The only sample of a group gets
    0, as with any group baseline.

    Raises ValueError for a reward that is missing, not finite or below 0.
    """
    return relative_to_group(groups, _of_group)


def _of_group(rewards: Sequence[float]) -> list[float]:
    if any(r < 0 for r in rewards):
        raise ValueError(
            f"rewards {list(rewards)} with algorithm.advantage = 'maxrl', which divides by their mean: use "
            "rewards of 0 or more (without penalties), or another advantage"
        )
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    return [(r - mean) / mean for r in rewards]
