"""Bounds on the mismatch: breaches of a step, and down-weighting of tokens and samples.

Letters: N samples a pack, T packed tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from miles_like.algorithms.terms.mismatch import EXTREME_RATIO, SAFE_LOG, mean_stat
from miles_like.algorithms.terms.sequences import sequence_means, to_tokens
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds on `mismatch/kl`, `mismatch/logprob_abs_diff_max` and `mismatch/extreme_frac` (docs/metrics.md); None: no
    bound."""

    kl_max: float | None = None
    logprob_abs_diff_max: float | None = None
    extreme_frac_max: float | None = None

    def broken(self, metrics: Mapping[str, float]) -> list[str]:
        """One message per bound that `metrics` exceed. A nan exceeds its bound, a missing metric does not."""
        out = []
        for key, metric in _METRICS.items():
            bound, value = getattr(self, key), metrics.get(metric)
            if bound is not None and value is not None and not value <= bound:
                out.append(f"{metric} = {value:.3g} is above mismatch.{key} = {bound:g}")
        bare = all(getattr(self, key) is None for key in _METRICS)
        if not bare and metrics.get("mismatch/nan_frac", 0.0) > 0:
            out.append(f"mismatch/nan_frac = {metrics['mismatch/nan_frac']:.3g}: log-probabilities are not numbers")
        return out

    def weights(
        self,
        *,
        old_logprobs: Tensor,  # [T] fp32, by the trainer before the rollout's first step
        rollout_logprobs: Tensor,  # [T] fp32
        loss_mask: Tensor,  # [T] bool
        cu_seqlens: Tensor,  # [N+1] int32
    ) -> tuple[Tensor, dict[str, Stat]]:
        """[T] weights in [0, 1] without gradient, 0 where not `loss_mask`, and `train/mismatch_weight/...`.

        The weight is bound over value where a value is above its bound, and the smallest of these: for a sample its
        mean k3 and its share of extreme tokens, for a token its absolute log-ratio. Tokens within all bounds have
        weight 1. A token whose log-ratio is not finite has the weight nan, as with a correction.
        """
        delta = torch.where(loss_mask, (old_logprobs - rollout_logprobs).detach(), 0.0)
        delta = torch.where(torch.isfinite(delta), delta, math.nan)
        safe = delta.clamp(-SAFE_LOG, SAFE_LOG)
        extreme = torch.where(delta.isnan(), delta, (delta.abs() > math.log(EXTREME_RATIO)).to(delta.dtype))

        def of_sample(values: Tensor) -> Tensor:
            means = sequence_means(values, loss_mask=loss_mask, cu_seqlens=cu_seqlens)
            return to_tokens(means, cu_seqlens=cu_seqlens, tokens=len(delta))

        weight = torch.ones_like(delta, dtype=torch.float64)
        for bound, figure in (
            (self.kl_max, of_sample((torch.expm1(safe) - safe).clamp(min=0))),
            (self.extreme_frac_max, of_sample(extreme)),
            (self.logprob_abs_diff_max, delta.abs().double()),
        ):
            if bound is not None:
                share = torch.where(figure > bound, bound / figure, 1.0)
                weight = torch.minimum(weight, torch.where(figure.isnan(), figure, share))
        weight = torch.where(loss_mask, weight, 0.0).to(old_logprobs.dtype)
        return weight, {
            "train/mismatch_weight/mean": mean_stat(weight, loss_mask),
            "train/mismatch_weight/reduced_frac": mean_stat(weight < 1, loss_mask),
        }


_METRICS = {
    "kl_max": "mismatch/kl",
    "logprob_abs_diff_max": "mismatch/logprob_abs_diff_max",
    "extreme_frac_max": "mismatch/extreme_frac",
}
