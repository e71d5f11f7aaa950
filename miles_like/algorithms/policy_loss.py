"""The clipped policy-gradient loss.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypedDict

import torch
from torch import Tensor

from miles_like.algorithms.bounds import Bounds
from miles_like.algorithms.correction import Correction
from miles_like.algorithms.mismatch import max_stat, mean_stat, mismatch_stats
from miles_like.algorithms.sequences import sequence_means, to_tokens
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedLoss:
    """-w min(r A, clip(r, 1 - low, 1 + high) A), r = p_train / p_old (PPO, arXiv:1707.06347 eq. 7).

    Two-sided bounds are DAPO's (arXiv:2503.14476). With ratio_of = "sequence", r is that of the whole sample, the
    geometric mean exp(mean over its tokens of log p_train - log p_old), and the gradient goes through it (GSPO,
    arXiv:2507.18071 eq. 5 to 7). The paper then means over samples; here a sample's loss stands at each of its tokens,
    so it weighs by its length, as everything does that is divided by the batch's number of tokens.

    Who p_old is, and the weight w against the rest of the mismatch, detached:

    * with a correction: the trainer before this rollout's first optimizer step. These are `old_logprobs`, or when they
      are None (one step a rollout) `logprobs.detach()`: then r is 1 and only its gradient matters. w is a function of
      p_old / p_rollout (correction.py).
    * without a correction, `old_logprobs` given: the same p_old; w is 1 and the mismatch stays in the loss,
      uncorrected.
    * without a correction, `old_logprobs` None: the rollout itself. The clipped ratio then holds the mismatch. w is 1.

    Mismatch is in all three of the trainer before the first step against the rollout.

    With kl_coefficient > 0, plus kl_coefficient * k3, k3 = exp(d) - 1 - d with d = log p_ref - log p_train (GRPO,
    arXiv:2402.03300 eq. 4; the estimator is Schulman's, http://joschu.net/blog/kl-approx.html): never negative, and
    its mean over the policy's own samples is KL(train || ref). It is neither clipped nor weighted.

    With `bounds`, tokens and samples whose mismatch is above them weigh bound over mismatch, besides w (bounds.py).
    """

    clip_low: float
    clip_high: float
    kl_coefficient: float = 0.0
    ratio_of: Literal["token", "sequence"] = "token"
    correction: Correction | None = None
    bounds: Bounds | None = None

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
        streams: Mapping[str, Tensor] = MappingProxyType({}),
        candidate_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Mapping[str, Stat]]:
        """[T] loss, 0 where not `loss_mask`, and statistics over tokens under loss (docs/metrics.md).

        `train/kl_ref` is there when `ref_logprobs` is. A nan in `logprobs` under the mask comes out as a nan loss, and
        with a correction so does one in `rollout_logprobs` or `old_logprobs`; it is never replaced.
        """
        assert ref_logprobs is not None or not self.kl_coefficient, "kl_coefficient > 0, but nobody kept a reference"
        before = logprobs.detach() if old_logprobs is None else old_logprobs  # [T] by the trainer
        policy = rollout_logprobs if self.correction is None and old_logprobs is None else before
        # Outside the mask log-ratio and advantage are set to 0, so nothing there can overflow into the gradient.
        delta = torch.where(loss_mask, logprobs - policy, 0.0)  # [T]
        surrogate, stats = self._clipped(delta, torch.where(loss_mask, advantages, 0.0), loss_mask, cu_seqlens)
        sides: _Sides = {
            "old_logprobs": before,
            "rollout_logprobs": rollout_logprobs,
            "loss_mask": loss_mask,
            "cu_seqlens": cu_seqlens,
        }
        if self.correction is not None:
            weight, of_weights = self.correction.weights(**sides)
            surrogate, stats = surrogate * weight, stats | of_weights
        if self.bounds is not None:
            weight, of_weights = self.bounds.weights(**sides)
            surrogate, stats = surrogate * weight, stats | of_weights
        loss = torch.where(loss_mask, -surrogate, 0.0)
        stats |= {
            "train/pg_loss": mean_stat(loss, loss_mask),
            "train/entropy": mean_stat(entropy, loss_mask),
            "train/kl_old": mean_stat(-delta, loss_mask),
            **mismatch_stats(**sides),
        }
        if ref_logprobs is not None:
            above = torch.where(loss_mask, ref_logprobs - logprobs, 0.0)  # [T]
            k3 = torch.expm1(above) - above
            stats["train/kl_ref"] = mean_stat(k3, loss_mask)
            if self.kl_coefficient:
                loss = loss + self.kl_coefficient * k3
        return loss, stats

    def _clipped(
        self, delta: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        """[T] min(r A, clip(r) A) from [T] log-ratios, which are 0 outside the mask, and how far it was clipped."""
        log_ratio = delta
        if self.ratio_of == "sequence":
            of_sample = sequence_means(delta, loss_mask=loss_mask, cu_seqlens=cu_seqlens).to(delta.dtype)
            log_ratio = to_tokens(of_sample, cu_seqlens=cu_seqlens, tokens=len(delta))
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        cut_low = (advantages < 0) & (ratio < 1 - self.clip_low)
        cut_high = (advantages > 0) & (ratio > 1 + self.clip_high)
        return torch.minimum(ratio * advantages, clipped * advantages), {
            "train/clip_frac/low": mean_stat(cut_low, loss_mask),
            "train/clip_frac/high": mean_stat(cut_high, loss_mask),
            "train/is_weight/mean": mean_stat(ratio, loss_mask),
            "train/is_weight/max": max_stat(ratio, loss_mask),
        }


class _Sides(TypedDict):
    """What trainer and rollout said of the same tokens."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
