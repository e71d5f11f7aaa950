"""The clipped surrogate of PPO, as used by GRPO, DAPO and most others.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_like.algorithms.losses.base import PolicyLoss
from miles_like.algorithms.terms.mismatch import max_stat, mean_stat
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss(PolicyLoss):
    """S = min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv:1707.06347 eq. 7; with two bounds, DAPO,
    arXiv:2503.14476 eq. 10). With `clip_dual` = c, where A < 0: S = max(that, c A), so that a token with A < 0
    has no gradient for r > c (dual clip, arXiv:1912.09729 eq. 5)."""

    clip_low: float
    clip_high: float
    clip_dual: float | None = None

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        check_bounds(self.clip_low, self.clip_high)
        if self.clip_dual is not None and not self.clip_dual > 1 + self.clip_high:
            raise ValueError(f"clip_dual {self.clip_dual} must be above 1 + clip_high = {1 + self.clip_high}")

    def _ratio(self, delta: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T] r."""
        return delta.exp()

    def _surrogate(
        self, *, delta: Tensor, logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        ratio = self._ratio(delta, loss_mask, cu_seqlens)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        bad = advantages < 0
        surrogate = torch.minimum(ratio * advantages, clipped * advantages)
        stats = {
            **clip_stats(ratio, advantages, loss_mask, low=self.clip_low, high=self.clip_high),
            **ratio_stats(ratio, loss_mask),
        }
        if self.clip_dual is not None:
            surrogate = torch.where(bad, torch.maximum(surrogate, self.clip_dual * advantages), surrogate)
            stats["train/clip_frac/dual"] = mean_stat(bad & (ratio > self.clip_dual), loss_mask)
        return surrogate, stats


def check_bounds(low: float, high: float) -> None:
    """Raises ValueError for clip bounds outside their ranges."""
    if not (0 < low <= 1 and high > 0):
        raise ValueError(f"clip_low {low} must be in (0, 1] and clip_high {high} above 0")


def clip_stats(ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, low: float, high: float) -> dict[str, Stat]:
    """Shares of [T] tokens whose gradient the clip removes, below and above."""
    return {
        "train/clip_frac/low": mean_stat((advantages < 0) & (ratio < 1 - low), loss_mask),
        "train/clip_frac/high": mean_stat((advantages > 0) & (ratio > 1 + high), loss_mask),
    }


def ratio_stats(ratio: Tensor, loss_mask: Tensor) -> dict[str, Stat]:
    """Statistics of [T] r; those of a correction replace them."""
    return {
        "train/is_weight/mean": mean_stat(ratio, loss_mask),
        "train/is_weight/max": max_stat(ratio, loss_mask),
    }
