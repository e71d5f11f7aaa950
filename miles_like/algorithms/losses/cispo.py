"""CISPO: clipped importance sampling weights.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_like.algorithms.losses.base import PolicyLoss
from miles_like.algorithms.losses.clipped import check_bounds, ratio_stats
from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class CispoLoss(PolicyLoss):
    """S = sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p_train: the weight is bounded and every token keeps its
    gradient (CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4 and 5). The paper sets no lower bound: clip_low = 1."""

    clip_low: float
    clip_high: float

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        check_bounds(self.clip_low, self.clip_high)

    def _surrogate(
        self, *, delta: Tensor, logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        ratio = delta.detach().exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return weight * advantages * logprobs, {
            "train/clip_frac/low": mean_stat(ratio < 1 - self.clip_low, loss_mask),
            "train/clip_frac/high": mean_stat(ratio > 1 + self.clip_high, loss_mask),
            **ratio_stats(ratio, loss_mask),
        }
