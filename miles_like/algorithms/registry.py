"""Algorithms by name.

Letters: G samples a prompt.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from miles_like.algorithm_config import AlgorithmConfig, CorrectionConfig
from miles_like.algorithms.advantages import group_relative
from miles_like.algorithms.bounds import Bounds
from miles_like.algorithms.correction import Correction
from miles_like.algorithms.policy_loss import ClippedLoss
from miles_like.config import MismatchConfig
from miles_like.protocols import Algorithm
from miles_like.types import Aggregation, SampleGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """Rewards relative to their group; a clipped ratio, of tokens (GRPO) or of samples (GSPO); token mean over the
    global batch."""

    name: str
    loss: ClippedLoss
    normalize_std: bool

    aggregation: Aggregation = Aggregation.TOKEN_MEAN
    needs: frozenset[str] = frozenset()

    def advantages(self, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float]]:
        """For each group [G]; raises ValueError when a sample was not scored or its reward is not finite."""
        return [group_relative(group.rewards, normalize_std=self.normalize_std) for group in groups]

    def returns(self, groups: Sequence[SampleGroup]) -> None:
        """There is no critic."""


def make_correction(config: CorrectionConfig) -> Correction | None:
    """None: off."""
    if config.kind == "off":
        return None
    level, action, low, high, veto = config.level, config.action, config.low, config.high, config.veto
    assert level and action and low is not None and high is not None and veto is not None, "config filled them in"
    return Correction(level=level, action=action, low=low, high=high, veto=veto)


def _group_relative(
    config: AlgorithmConfig,
    correction: CorrectionConfig,
    bounds: Bounds | None,
    *,
    ratio_of: Literal["token", "sequence"],
) -> Algorithm:
    return GroupRelative(
        name=config.name,
        loss=ClippedLoss(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coefficient=config.kl_coefficient,
            ratio_of=ratio_of,
            correction=make_correction(correction),
            bounds=bounds,
        ),
        normalize_std=config.normalize_std,
    )


ALGORITHMS: dict[str, Callable[[AlgorithmConfig, CorrectionConfig, Bounds | None], Algorithm]] = {
    "grpo": partial(_group_relative, ratio_of="token"),
    "gspo": partial(_group_relative, ratio_of="sequence"),
}


def make_bounds(config: MismatchConfig) -> Bounds:
    return Bounds(**config.bounds)


def make_algorithm(
    config: AlgorithmConfig, correction: CorrectionConfig, mismatch: MismatchConfig | None = None
) -> Algorithm:
    """Raises ValueError for an unknown name, naming the nearest known one."""
    build = ALGORITHMS.get(config.name)
    if build is None:
        near = difflib.get_close_matches(config.name, ALGORITHMS, n=1, cutoff=0.0)
        raise ValueError(
            f"unknown algorithm.name {config.name!r}: did you mean {near[0]!r}? Known: {sorted(ALGORITHMS)}"
        )
    weighs = mismatch is not None and mismatch.on_breach == "down_weight"
    return build(config, correction, make_bounds(mismatch) if weighs and mismatch is not None else None)
