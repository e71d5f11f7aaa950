"""Mismatch statistics: how far the trainer's log-probabilities are from those of the rollout.

Letters: N samples a pack, T packed tokens.

With delta_t = log p_old(y_t) - log p_rollout(y_t) and rho_t = exp(delta_t), over loss tokens; p_old is the trainer's
probability before the rollout's first optimizer step. If trainer and rollout have the same weights (no staleness),
delta is pure mismatch: different kernels, precisions or routes of one model. It is exactly 0 in deterministic mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from miles_like.algorithms.terms.sequences import sequence_lengths, sequence_sums
from miles_like.types import Reduce, Stat

EXTREME_RATIO = 2.0  # tau of F(tau) in the R3 paper, arXiv:2510.11370
SAFE_LOG = 20.0  # exp(20) is 5e8: a larger ratio is not informative, and its square would overflow fp32

_RHO = "mismatch/rho{}_mean"
_RHO_SQUARE = "mismatch/rho{}_sq_mean"


def mean_stat(values: Tensor, mask: Tensor) -> Stat:
    """Mean of `values` [T] where `mask` [T]."""
    chosen = values.detach()[mask].float()
    return Stat(total=chosen.sum(), count=_count(chosen))


def sum_stat(values: Tensor, mask: Tensor) -> Stat:
    """Sum of `values` [T] where `mask` [T]."""
    chosen = values.detach()[mask].float()
    return Stat(total=chosen.sum(), count=_count(chosen), reduce=Reduce.SUM)


def max_stat(values: Tensor, mask: Tensor) -> Stat:
    """Largest of non-negative `values` [T] where `mask` [T]; 0, the neutral element, over no token."""
    chosen = values.detach()[mask].float()
    return Stat(total=chosen.max() if len(chosen) else chosen.new_zeros(()), count=_count(chosen), reduce=Reduce.MAX)


def min_stat(values: Tensor, mask: Tensor) -> Stat:
    """Smallest of `values` [T] where `mask` [T]; infinity, the neutral element, over no token."""
    chosen = values.detach()[mask].float()
    total = chosen.min() if len(chosen) else chosen.new_full((), math.inf)
    return Stat(total=total, count=_count(chosen), reduce=Reduce.MIN)


def _count(chosen: Tensor) -> Tensor:
    return torch.tensor(float(chosen.numel()), device=chosen.device)


def mismatch_stats(
    *, old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
) -> dict[str, Stat]:
    """[T] each, [N+1] int32 -> statistics over loss tokens.

    A token whose delta is not finite is counted and excluded, and its sample is excluded from sample statistics.
    docs/metrics.md has the definitions; `finish` computes ess and chi2 from `rho..._mean` and `rho..._sq_mean`. Ratios
    are of logs clamped to +-20.
    """
    delta = (old_logprobs - rollout_logprobs).detach().float()
    finite = torch.isfinite(delta)
    good = loss_mask & finite
    delta = torch.where(good, delta, 0.0)
    safe = delta.clamp(-SAFE_LOG, SAFE_LOG)
    extreme = delta.abs() > math.log(EXTREME_RATIO)
    bad = loss_mask & ~finite
    sums = sequence_sums(delta, loss_mask=loss_mask, cu_seqlens=cu_seqlens).clamp(-SAFE_LOG, SAFE_LOG)  # [N]
    whole = sequence_sums(bad.double(), loss_mask=loss_mask, cu_seqlens=cu_seqlens) == 0
    whole &= sequence_lengths(loss_mask=loss_mask, cu_seqlens=cu_seqlens) > 0
    return {
        "mismatch/logprob_abs_diff": mean_stat(delta.abs(), good),
        "mismatch/logprob_abs_diff_max": max_stat(delta.abs(), good),
        "mismatch/prob_abs_diff": mean_stat((old_logprobs.exp() - rollout_logprobs.exp()).abs(), good),
        "mismatch/k1": mean_stat(-delta, good),
        "mismatch/k2": mean_stat(delta.square() / 2, good),
        "mismatch/kl": mean_stat(torch.expm1(safe) - safe, good),
        "mismatch/extreme_frac": mean_stat(extreme, good),
        "mismatch/extreme_count": sum_stat(extreme, good),
        "mismatch/nan_frac": mean_stat(bad, loss_mask),
        "mismatch/nan_count": sum_stat(bad, loss_mask),
        **_moments("", safe, good),
        **_moments("_sequence", sums, whole),
    }


def _moments(of: str, log_ratio: Tensor, mask: Tensor) -> dict[str, Stat]:
    return {
        _RHO.format(of): mean_stat(log_ratio.exp(), mask),
        _RHO_SQUARE.format(of): mean_stat((2 * log_ratio).exp(), mask),
    }


def finish(metrics: Mapping[str, float]) -> dict[str, float]:
    """Reduced metrics with `mismatch/ess` and `mismatch/chi2`, of tokens and of samples, in place of the means that
    they are computed from.

    ESS = (sum rho)^2 / (n sum rho^2) = mean(rho)^2 / mean(rho^2), in (0, 1]; chi2 = mean(rho^2) - 1. A quotient of sums
    can be formed only after the reduction over micro-batches and ranks. Other metrics are unchanged, so a second call
    is harmless.
    """
    out = dict(metrics)
    for of in ("", "_sequence"):
        mean, square = out.pop(_RHO.format(of), None), out.pop(_RHO_SQUARE.format(of), None)
        if mean is not None and square:
            out[f"mismatch/ess{of}"] = mean * mean / square
            out[f"mismatch/chi2{of}"] = square - 1
    return out
