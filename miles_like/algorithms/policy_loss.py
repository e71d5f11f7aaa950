"""The clipped policy-gradient loss.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_like.algorithms.mismatch import max_stat, mean_stat, mismatch_stats
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A), r = p_train / p_old (PPO, arXiv:1707.06347 eq. 7).

    With `old_logprobs` p_old is what the trainer itself gave the tokens before the rollout's first optimizer step.
    Without them the rollout's own log-probabilities are the old policy's: there is one update a rollout, so a second
    forward of the old weights would measure only the mismatch, which then would hide in the denominator. Mismatch is
    in either case that of the weights before the first step against the rollout. Two-sided bounds are DAPO's
    (arXiv:2503.14476).

    With kl_coefficient > 0, plus kl_coefficient * k3, k3 = exp(d) - 1 - d with d = log p_ref - log p_train (GRPO,
    arXiv:2402.03300 eq. 4; the estimator is Schulman's, http://joschu.net/blog/kl-approx.html): never negative, and
    its mean over the policy's own samples is KL(train || ref). It is not clipped.
    """

    clip_low: float
    clip_high: float
    kl_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.clip_low <= 1 and self.clip_high > 0):
            raise ValueError(f"clip_low {self.clip_low} must be in (0, 1] and clip_high {self.clip_high} above 0")
        if not self.kl_coefficient >= 0:
            raise ValueError(f"kl_coefficient {self.kl_coefficient} must be 0 or more")

    def __call__(
        self,
        *,
        logprobs: Tensor,  # [T] fp32, carries the gradient
        entropy: Tensor,  # [T] fp32
        rollout_logprobs: Tensor,  # [T] fp32
        advantages: Tensor,  # [T] fp32
        loss_mask: Tensor,  # [T] bool
        cu_seqlens: Tensor,  # [N+1] int32
        ref_logprobs: Tensor | None = None,  # [T] fp32
        old_logprobs: Tensor | None = None,  # [T] fp32
    ) -> tuple[Tensor, Mapping[str, Stat]]:
        """[T] loss, 0 where not `loss_mask`, and statistics over tokens under loss (docs/metrics.md).

        `train/kl_ref` is there when `ref_logprobs` is. A nan in `logprobs` under the mask comes out as a nan loss; it
        is never replaced.
        """
        assert ref_logprobs is not None or not self.kl_coefficient, "kl_coefficient > 0, but nobody kept a reference"
        # Outside the mask the log-ratio is set to 0 before exp, so nothing there can overflow into the gradient.
        before = rollout_logprobs if old_logprobs is None else old_logprobs
        delta = torch.where(loss_mask, logprobs - before, 0.0)  # [T]
        ratio = delta.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        loss = torch.where(loss_mask, -torch.minimum(ratio * advantages, clipped * advantages), 0.0)
        cut_low = (advantages < 0) & (ratio < 1 - self.clip_low)
        cut_high = (advantages > 0) & (ratio > 1 + self.clip_high)
        stats = {
            "train/pg_loss": mean_stat(loss, loss_mask),
            "train/entropy": mean_stat(entropy, loss_mask),
            "train/kl_old": mean_stat(-delta, loss_mask),
            "train/clip_frac/low": mean_stat(cut_low.float(), loss_mask),
            "train/clip_frac/high": mean_stat(cut_high.float(), loss_mask),
            "train/is_weight/mean": mean_stat(ratio, loss_mask),
            "train/is_weight/max": max_stat(ratio, loss_mask),
            **mismatch_stats(
                logprobs=logprobs if old_logprobs is None else old_logprobs,
                rollout_logprobs=rollout_logprobs,
                loss_mask=loss_mask,
            ),
        }
        if ref_logprobs is not None:
            above = torch.where(loss_mask, ref_logprobs - logprobs, 0.0)  # [T]
            k3 = torch.expm1(above) - above
            stats["train/kl_ref"] = mean_stat(k3, loss_mask)
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * k3
        return loss, stats
