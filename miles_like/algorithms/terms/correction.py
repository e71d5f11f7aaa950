"""Importance weights against the mismatch between trainer and rollout.

Letters: N samples a pack, T packed tokens.

With Delta_t = log p_old(y_t) - log p_rollout(y_t) over loss tokens, where p_old is the trainer's probability
before the rollout's first optimizer step, a measure rho of a token or of its whole sample is

* token: exp(Delta_t), as in TIS (https://fengyao.notion.site/off-policy-rl) and IcePop (arXiv:2510.18855)
* sequence: exp(sum of Delta), the log clamped to +-20 (verl's rollout_corr_helper; sequence-level IS and MIS:
  https://richardli.xyz/rl-collapse)
* geometric: exp(mean of Delta), which does not grow with length (the same)
* k3: mean of exp(Delta) - 1 - Delta (verl's K3-RS, same file); it decides only which samples are masked, the weight
  is 1

and the weight w of a token is clamp(rho, low, high) (truncate), or rho inside [low, high] and 0 outside (mask). A veto
gives weight 0 to every token of a sample that has a token with exp(Delta_t) < veto (Miles' mis.py).

TIS is token, truncate, [0, 2]; CIS is token, truncate, [1/C, C]; IcePop is token, mask, [0.5, 5]; MIS is masking at any
level. Weights carry no gradient and multiply the policy-gradient loss. The estimators are expectations over the
rollout's samples, so a masked token contributes 0 and stays in the loss's denominator. Weights are not normalized to
mean 1: their mean over the whole batch is known only after the forward pass of every micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miles_like.algorithms.terms.mismatch import SAFE_LOG, max_stat, mean_stat, min_stat
from miles_like.algorithms.terms.sequences import sequence_lengths, sequence_means, sequence_sums, to_tokens
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """One rule for weights; `CorrectionConfig` validates the settings."""

    level: Literal["token", "sequence", "geometric", "k3"]
    action: Literal["truncate", "mask"]
    low: float
    high: float
    veto: float = 0.0  # 0: none

    def __post_init__(self) -> None:
        assert self.low <= (0.0 if self.level == "k3" else 1.0) <= self.high, "the bounds exclude equal log-probs"
        assert self.level != "k3" or self.action == "mask", "a divergence cannot be a weight"

    def weights(
        self,
        *,
        old_logprobs: Tensor,  # [T] fp32, by the trainer before the rollout's first step
        rollout_logprobs: Tensor,  # [T] fp32
        loss_mask: Tensor,  # [T] bool
        cu_seqlens: Tensor,  # [N+1] int32
    ) -> tuple[Tensor, dict[str, Stat]]:
        """[T] weights without gradient, 0 where not `loss_mask`, and `train/is_weight/...` (docs/metrics.md).

        A token whose Delta is not finite has the weight nan, and at sample levels its whole sample does, vetoed or not:
        it is never dropped silently.
        """
        delta = torch.where(loss_mask, (old_logprobs - rollout_logprobs).detach(), 0.0)
        delta = torch.where(torch.isfinite(delta), delta, math.nan)
        rho = self._measure(delta, loss_mask, cu_seqlens)
        outside = loss_mask & ((rho < self.low) | (rho > self.high))  # nan is neither
        weight = rho if self.level != "k3" else torch.where(rho.isnan(), rho, 1.0)
        if self.action == "truncate":
            weight, dropped = weight.clamp(self.low, self.high), torch.zeros_like(loss_mask)
        else:
            dropped = outside
        vetoed = None
        if self.veto:
            extreme = sequence_sums((delta < math.log(self.veto)).double(), loss_mask=loss_mask, cu_seqlens=cu_seqlens)
            vetoed = extreme > 0  # [N]
            dropped = dropped | (loss_mask & to_tokens(vetoed, cu_seqlens=cu_seqlens, tokens=len(delta)))
        dropped = dropped & ~weight.isnan()
        weight = torch.where(loss_mask & ~dropped, weight, 0.0).to(old_logprobs.dtype)
        truncated = outside & ~dropped if self.action == "truncate" else None
        return weight, _stats(weight, truncated, dropped, vetoed, loss_mask, cu_seqlens)

    def _measure(self, delta: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[T] rho of each token, or of its sample; sums over samples are fp64."""
        if self.level == "token":
            return delta.clamp(-SAFE_LOG, SAFE_LOG).exp()
        if self.level == "sequence":
            sums = sequence_sums(delta, loss_mask=loss_mask, cu_seqlens=cu_seqlens)
            of_sample = sums.clamp(-SAFE_LOG, SAFE_LOG).exp()
        elif self.level == "geometric":
            of_sample = (
                sequence_means(delta, loss_mask=loss_mask, cu_seqlens=cu_seqlens).clamp(-SAFE_LOG, SAFE_LOG).exp()
            )
        else:
            safe = delta.clamp(-SAFE_LOG, SAFE_LOG)
            k3 = (torch.expm1(safe) - safe).clamp(min=0)  # below 0 only by rounding
            of_sample = sequence_means(k3, loss_mask=loss_mask, cu_seqlens=cu_seqlens)
        return to_tokens(of_sample, cu_seqlens=cu_seqlens, tokens=len(delta))


def _stats(
    weight: Tensor,
    truncated: Tensor | None,
    dropped: Tensor,
    vetoed: Tensor | None,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
) -> dict[str, Stat]:
    """Shares of loss tokens, and of samples with such a token among the samples with a loss token."""
    has_loss = sequence_lengths(loss_mask=loss_mask, cu_seqlens=cu_seqlens) > 0

    def shares(kind: str, chosen: Tensor) -> dict[str, Stat]:
        hit = sequence_sums(chosen.double(), loss_mask=loss_mask, cu_seqlens=cu_seqlens) > 0
        return {
            f"train/is_weight/{kind}_frac": mean_stat(chosen, loss_mask),
            f"train/is_weight/{kind}_sequence_frac": mean_stat(hit, has_loss),
        }

    stats = {
        "train/is_weight/mean": mean_stat(weight, loss_mask),
        "train/is_weight/max": max_stat(weight, loss_mask),
        "train/is_weight/min": min_stat(weight, loss_mask),
        **shares("mask", dropped),
    }
    if truncated is not None:
        stats |= shares("trunc", truncated)
    if vetoed is not None:
        stats["train/is_weight/veto_sequence_frac"] = mean_stat(vetoed, has_loss)
    return stats
