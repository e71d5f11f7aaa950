"""Algorithms by name.

Letters: G samples a prompt.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_like.algorithms.advantages import group_relative
from miles_like.algorithms.policy_loss import ClippedLoss
from miles_like.config import AlgorithmConfig
from miles_like.protocols import Algorithm
from miles_like.types import SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """GRPO: rewards relative to their group, clipped ratio, token mean over the global batch."""

    name: str
    loss: ClippedLoss
    normalize_std: bool

    def advantages(self, group: SampleGroup) -> Sequence[float]:
        """[G]; raises ValueError when a sample was not scored or its reward is not finite."""
        return group_relative(group.rewards, normalize_std=self.normalize_std)


def grpo(config: AlgorithmConfig) -> Algorithm:
    return GroupRelative(
        name="grpo",
        loss=ClippedLoss(clip_low=config.clip_low, clip_high=config.clip_high, kl_coefficient=config.kl_coefficient),
        normalize_std=config.normalize_std,
    )


ALGORITHMS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {"grpo": grpo}


def make_algorithm(config: AlgorithmConfig) -> Algorithm:
    """Raises ValueError for an unknown name, naming the nearest known one."""
    build = ALGORITHMS.get(config.name)
    if build is None:
        near = difflib.get_close_matches(config.name, ALGORITHMS, n=1, cutoff=0.0)
        raise ValueError(
            f"unknown algorithm.name {config.name!r}: did you mean {near[0]!r}? Known: {sorted(ALGORITHMS)}"
        )
    return build(config)
