"""Rewards of a group, checked.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math

from miles_like.types import SampleGroup


def finite_rewards(group: SampleGroup) -> list[float]:
    """[G]; raises ValueError for a sample without a reward or with one that is not finite."""
    rewards = group.rewards
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"prompt {group.prompt.id!r}: rewards {rewards} are not all finite: check the reward function")
    return rewards
