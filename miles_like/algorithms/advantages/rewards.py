"""Rewards of a group, checked, and numbers of its episodes as numbers of its samples.

Letters: G samples a prompt, E episodes a prompt: as many, unless an episode has several rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from miles_like.types import SampleGroup

T = TypeVar("T")


def finite_rewards(group: SampleGroup) -> list[float]:
    """[E]; raises ValueError for a sample without a reward or with one that is not finite, and for an episode whose
    rows have different rewards."""
    rewards = group.rewards
    if not all(math.isfinite(r) for r in rewards):
        raise ValueError(f"prompt {group.prompt.id!r}: rewards {rewards} are not all finite: check the reward function")
    if len(rewards) < len(group.samples):
        _check_rows(group)
    return rewards


def per_sample(group: SampleGroup, values: Sequence[T]) -> list[T]:
    """[E] -> [G]: the rows of an episode have its value."""
    if len(values) == len(group.samples):
        return list(values)
    of = dict(zip((s.index for s in group.episodes), values, strict=True))
    return [of[s.index] for s in group.samples]


def relative_to_group(
    groups: Sequence[SampleGroup], advantages: Callable[[Sequence[float]], Sequence[float]]
) -> list[list[float]]:
    """For each group [G], from `advantages` of its episodes' rewards. Raises ValueError as `finite_rewards`."""
    return [per_sample(group, advantages(finite_rewards(group))) for group in groups]


def _check_rows(group: SampleGroup) -> None:
    for rows in group.rows:
        found = {s.reward for s in rows}
        if len(found) > 1:
            raise ValueError(
                f"the {len(rows)} rows of episode {rows[0].name} have the rewards {[s.reward for s in rows]}: they "
                "share one"
            )
