"""Estimators of KL(policy || reference) from the policy's own samples, and the penalty that is taken off the reward."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(
    above: Tensor, estimator: Estimator, *, log_ratio_clamp: float | None = None, k3_clamp: float | None = None
) -> Tensor:
    """Of each token, from d = log p_ref - log p (http://joschu.net/blog/kl-approx.html), in nats:

    * k1 = -d: its mean is KL(policy || ref); single values are signed and scatter most.
    * k2 = d^2 / 2: biased, never negative. Its gradient has the mean of KL's, where the samples are the policy's own.
    * k3 = exp(d) - 1 - d: its mean is KL(policy || ref), never negative. The gradient's mean is that of
      KL(ref || policy).

    The gradient of k1 by the policy is the score function alone, whose mean is 0: in a loss k1 pulls nowhere, unless it
    is multiplied by p / p_sampled ("unbiased", losses/base.py). In a reward it needs no gradient.

    The clamps are of k3 alone, in nats, None for none: d is bounded to +-log_ratio_clamp, then the value by k3_clamp
    (verl's kl_penalty_forward has 20 and 10). A token beyond one has no gradient.
    """
    if estimator == "k1":
        return -above
    if estimator == "k2":
        return above.square() / 2
    if log_ratio_clamp is not None:
        above = above.clamp(-log_ratio_clamp, log_ratio_clamp)
    k3 = torch.expm1(above) - above
    return k3 if k3_clamp is None else k3.clamp(max=k3_clamp)
