"""The plain policy gradient.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_like.algorithms.losses.base import PolicyLoss
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforceLoss(PolicyLoss):
    """S = A log p_train (REINFORCE, Williams 1992). There is no ratio: mismatch and staleness of samples
    stay in the gradient unless a correction weights it."""

    def _surrogate(
        self, *, delta: Tensor, logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        return advantages * logprobs, {}
