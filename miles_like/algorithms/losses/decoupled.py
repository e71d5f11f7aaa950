"""Decoupled PPO: stale data, with a proximal policy that is not the one that sampled it."""

from __future__ import annotations

from typing import Any

from miles_like.algorithms.correction import Correction
from miles_like.algorithms.losses.clipped import ClippedLoss


def decoupled_loss(*, behaviour_cap: float, **clipped: Any) -> ClippedLoss:
    """S = w min(r A, clip(r) A), with r = p_train / p_prox and w = p_prox / p_rollout, detached (decoupled PPO,
    arXiv:2110.00641; AReaL, arXiv:2505.24298 eq. 5).

    The proximal policy is the trainer before the rollout's first optimizer step: what samples may be several versions
    older than. As in AReaL's code a token with w above `behaviour_cap` is left out (w = 0) and not cut to it. This is a
    clipped loss with that correction of tokens, and so it shuts out another one. Raises ValueError for a cap below 1.
    """
    if behaviour_cap < 1:
        raise ValueError(f"behaviour_cap {behaviour_cap} must be 1 or more: at 1 both policies agree")
    return ClippedLoss(correction=Correction(level="token", action="mask", low=0.0, high=behaviour_cap), **clipped)
