"""Estimators of KL(policy || reference) from the policy's own samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3", "abs"]


def kl_estimate(
    above: Tensor, estimator: Estimator, *, log_ratio_clamp: float | None = None, k3_clamp: float | None = None
) -> Tensor:
    """Estimate per token, from d = log p_ref - log p (http://joschu.net/blog/kl-approx.html), in nats:

    * k1 = -d: its mean is KL(policy || ref); single values are signed and have the largest variance.
    * k2 = d^2 / 2: biased, never negative. On the policy's own samples its gradient has the mean of KL's.
    * k3 = exp(d) - 1 - d: its mean is KL(policy || ref), never negative. The gradient's mean is that of
      KL(ref || policy).
    * abs = |d|: biased, never negative. Its gradient has the same size at every token; verl's `abs`.

    The gradient of k1 by the policy is the score function, whose mean is 0: in a loss k1 has no effect on average,
    unless it is multiplied by p / p_sampled ("unbiased", losses/base.py). In a reward it needs no gradient.

    The clamps apply to k3 only, in nats, None for no clamp: d is clamped to +-log_ratio_clamp, then the value to at
    most k3_clamp (verl's kl_penalty_forward has 20 and 10). A token beyond a clamp has no gradient.
    """
    if estimator == "k1":
        return -above
    if estimator == "abs":
        return above.abs()
    if estimator == "k2":
        return above.square() / 2
    if log_ratio_clamp is not None:
        above = above.clamp(-log_ratio_clamp, log_ratio_clamp)
    k3 = torch.expm1(above) - above
    return k3 if k3_clamp is None else k3.clamp(max=k3_clamp)
