"""How far the trainer's log-probabilities are from those the rollout sampled with.

Letters: T packed tokens.

With delta_t = log p_train(y_t) - log p_rollout(y_t) and rho_t = exp(delta_t), over tokens under loss. When trainer and
rollout hold the same weights (no staleness, measured in the forward before the update) delta is pure mismatch: two
kernels, two precisions or two routings for one model. It is exactly 0 in deterministic mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from miles_like.types import Reduce, Stat

EXTREME_RATIO = 2.0  # tau of F(tau) in the R3 paper, arXiv:2510.11370

_RHO_SUM = "mismatch/rho_mean"
_RHO_SQUARE_SUM = "mismatch/rho_sq_mean"


def mean_stat(values: Tensor, mask: Tensor) -> Stat:
    """Mean of `values` [T] where `mask` [T]."""
    chosen = values.detach()[mask].float()
    return Stat(total=chosen.sum(), count=_count(chosen))


def max_stat(values: Tensor, mask: Tensor) -> Stat:
    """Largest of non-negative `values` [T] where `mask` [T]; 0 over no token, which no larger value loses to."""
    chosen = values.detach()[mask].float()
    return Stat(total=chosen.max() if len(chosen) else chosen.new_zeros(()), count=_count(chosen), reduce=Reduce.MAX)


def _count(chosen: Tensor) -> Tensor:
    return torch.tensor(float(chosen.numel()), device=chosen.device)


def mismatch_stats(*, logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> dict[str, Stat]:
    """[T] each -> statistics over tokens under loss. A token whose delta is not finite is counted and kept out.

    * logprob_abs_diff, logprob_abs_diff_max: |delta|
    * kl: k3 = rho - 1 - delta, whose mean estimates KL(rollout || train) (http://joschu.net/blog/kl-approx.html)
    * extreme_frac: max(rho, 1 / rho) > 2
    * nan_frac: delta is nan or infinite
    * rho_mean, rho_sq_mean: what `finish` makes the effective sample size of
    """
    delta = (logprobs - rollout_logprobs).detach().float()
    finite = torch.isfinite(delta)
    good = loss_mask & finite
    delta = torch.where(good, delta, torch.zeros_like(delta))
    rho = delta.exp()
    return {
        "mismatch/logprob_abs_diff": mean_stat(delta.abs(), good),
        "mismatch/logprob_abs_diff_max": max_stat(delta.abs(), good),
        "mismatch/kl": mean_stat(torch.expm1(delta) - delta, good),
        "mismatch/extreme_frac": mean_stat((delta.abs() > math.log(EXTREME_RATIO)).float(), good),
        "mismatch/nan_frac": mean_stat((~finite).float(), loss_mask),
        _RHO_SUM: mean_stat(rho, good),
        _RHO_SQUARE_SUM: mean_stat(rho.square(), good),
    }


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
    """Reduced metrics with `mismatch/ess` in place of the two means it is made of.

    ESS = (sum rho)^2 / (n sum rho^2) = mean(rho)^2 / mean(rho^2), in (0, 1]. A quotient of sums is no sum: it can be
    formed only after the reduction over micro-batches and ranks. Other metrics pass through, so it is safe twice.
    """
    out = dict(metrics)
    mean, square = out.pop(_RHO_SUM, None), out.pop(_RHO_SQUARE_SUM, None)
    if mean is not None and square:
        out["mismatch/ess"] = mean * mean / square
    return out
