"""REINFORCE leave-one-out.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_like.algorithms.advantages.rewards import relative_to_group
from miles_like.types import SampleGroup


def leave_one_out(groups: Sequence[SampleGroup]) -> list[list[float]]:
    """For each group [G]: the reward minus the mean reward of the prompt's other samples (RLOO, arXiv:2402.14740 eq. 5;
    Kool et al. 2019). The only sample of a group gets 0.

    Raises ValueError for a reward that is missing or not finite.
    """
    return relative_to_group(groups, _of_group)


def _of_group(rewards: Sequence[float]) -> list[float]:
    if len(set(rewards)) < 2:
        return [0.0] * len(rewards)
    total, others = math.fsum(rewards), len(rewards) - 1
    return [r - (total - r) / others for r in rewards]
