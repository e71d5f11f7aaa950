"""Soft adaptive policy optimization: a soft gate instead of a clip.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles_like.algorithms.losses.base import PolicyLoss
from miles_like.algorithms.losses.clipped import ratio_stats
from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class SapoLoss(PolicyLoss):
    """S = 4 / tau sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0 and tau_neg elsewhere (SAPO, arXiv:2511.20347).

    Its derivative by r is the gate 4 s (1 - s) A, s the sigmoid: A at r = 1, as without a gate, and smaller on both
    sides, the faster the larger tau is.
    """

    tau_pos: float
    tau_neg: float

    def __post_init__(self) -> None:
        PolicyLoss.__post_init__(self)
        if not (self.tau_pos > 0 and self.tau_neg > 0):
            raise ValueError(f"tau_pos {self.tau_pos} and tau_neg {self.tau_neg} must be above 0")

    def _surrogate(
        self, *, delta: Tensor, logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        ratio = delta.exp()
        tau = torch.where(advantages > 0, self.tau_pos, self.tau_neg).to(ratio.dtype)
        soft = torch.sigmoid(tau * (ratio - 1))
        return soft * 4 / tau * advantages, {
            "train/gate/mean": mean_stat(4 * soft * (1 - soft), loss_mask),
            **ratio_stats(ratio, loss_mask),
        }
