"""Decoupled PPO: stale data, with a proximal policy that is not the one that sampled it."""

from __future__ import annotations

from miles_like.algorithms.terms.correction import Correction


def behaviour_weights(cap: float) -> Correction:
    """The correction that makes a clipped loss decoupled PPO's: S = w min(r A, clip(r) A), with r = p_train / p_prox
    and w = p_prox / p_rollout, detached (arXiv:2110.00641; AReaL, arXiv:2505.24298 eq. 5).

    The proximal policy is the trainer before the rollout's first optimizer step; samples may be several versions older
    than it. As in AReaL's code a token with w above `cap` is left out (w = 0), not cut to it. Raises ValueError for a
    cap below 1.
    """
    if cap < 1:
        raise ValueError(f"behaviour_cap {cap} must be 1 or more: at 1 both policies agree")
    return Correction(level="token", action="mask", low=0.0, high=cap)
