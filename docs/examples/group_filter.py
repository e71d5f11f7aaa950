"""A custom group filter: train where the policy is neither sure to fail nor sure to succeed.

    [algorithm]
    filter = "./group_filter.py:in_reach"   # relative to the configuration; or, installed, my_package.filters:in_reach

    [rollout]
    max_rounds = 8   # how often further prompts are sampled in place of those that were left out

What is left out was sampled in vain: `rollout/filtered_frac` says how much.
"""

from __future__ import annotations

import statistics

from miles_like.protocols import GroupFilter
from miles_like.types import SampleGroup

LOW, HIGH = 0.1, 0.9


def in_reach(group: SampleGroup) -> str | None:
    """Protocol: GroupFilter. None keeps a scored group; otherwise a few words why it is left out, by which it is
    counted. Another prompt is sampled in its place."""
    mean = statistics.fmean(group.rewards)
    if mean < LOW:
        return "too hard"
    return "too easy" if mean > HIGH else None


_: GroupFilter = in_reach  # mypy holds it to its Protocol here
