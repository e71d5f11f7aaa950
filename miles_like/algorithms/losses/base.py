"""Base of the policy-gradient losses: the choice of the old policy, weights, penalties and statistics.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from miles_like.algorithms.terms.bounds import Bounds
from miles_like.algorithms.terms.correction import Correction
from miles_like.algorithms.terms.kl import Estimator, kl_estimate
from miles_like.algorithms.terms.mismatch import mean_stat, mismatch_stats
from miles_like.algorithms.terms.sequences import sequence_lengths, sequence_means, sequence_sums, to_tokens
from miles_like.types import REFERENCE, LossInputs, LossOutput, Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(ABC):
    """-w S + kl_coefficient KL - entropy_coefficient H, with the surrogate S of each subclass.

    S is a function of r = p_train / p_old. p_old and the detached weight w against the remaining mismatch are:

    * with a correction: p_old is the trainer before this rollout's first optimizer step. These are `old_logprobs`, or
      if they are None (one step per rollout) `logprobs.detach()`: then r is 1 and only its gradient matters. w is a
      function of p_old / p_rollout (correction.py).
    * without a correction, `old_logprobs` given: the same p_old; w is 1 and the mismatch stays in the loss,
      uncorrected.
    * without a correction, `old_logprobs` None: p_old is the rollout. The ratio then contains the mismatch. w is 1.

    Mismatch statistics are always of the trainer before the first step against the rollout.

    With `bounds`, tokens and samples above a bound are also weighted by bound over mismatch (bounds.py).

    With `off_policy_delta`, tokens with A < 0 in samples whose mean of log p_rollout - log p_train over their tokens is
    above it have S = 0 (off-policy sequence masking, DeepSeek-V3.2, arXiv:2512.02556 eq. 8 and 9, where p_old are the
    inference framework's probabilities, here p_rollout). They stay in the loss's denominator.

    KL is `kl_estimator` (kl.py) of p_train and p_ref; GRPO (arXiv:2402.03300 eq. 4) uses k3. With `kl_unbiased` it is
    multiplied by p_train / p_rollout, with its gradient (DeepSeek-V3.2 eq. 7): its mean over the rollout's samples, and
    that of its gradient, are those of KL(train || ref), for the unbiased estimators k1 and k3. Neither KL nor H, the
    entropy of the token's distribution, is clipped or weighted.

    With `log_ratio_clamp` = c, in nats, log r is clamped to +-c before its exponential is taken, and so is the
    log-ratio in k3; `k3_clamp` bounds the value of k3. A token beyond a clamp has no gradient of that term. None: no
    clamp.
    """

    kl_coefficient: float = 0.0
    kl_estimator: Estimator = "k3"
    kl_unbiased: bool = False
    entropy_coefficient: float = 0.0
    off_policy_delta: float | None = None
    correction: Correction | None = None
    bounds: Bounds | None = None
    log_ratio_clamp: float | None = None
    k3_clamp: float | None = None

    def __post_init__(self) -> None:
        for name in ("kl_coefficient", "entropy_coefficient"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} {getattr(self, name)} must be 0 or more")

    @abstractmethod
    def _surrogate(
        self, *, delta: Tensor, logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, cu_seqlens: Tensor
    ) -> tuple[Tensor, dict[str, Stat]]:
        """[T] S, which training maximizes, and statistics, from [T] log r, log p_train and A, 0 outside the mask."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] loss, 0 where not `loss_mask`, and statistics over loss tokens (docs/metrics.md).

        `train/kl_ref` needs `ref_logprobs` or a stream REFERENCE. A nan of a loss token in `logprobs` gives a nan loss,
        and with a correction also one in `rollout_logprobs` or `old_logprobs`; it is never replaced.
        """
        logprobs, entropy, loss_mask, old = inputs.logprobs, inputs.entropy, inputs.loss_mask, inputs.old_logprobs
        before = logprobs.detach() if old is None else old  # [T] by the trainer
        policy = inputs.rollout_logprobs if self.correction is None and old is None else before
        sides: _Sides = {
            "old_logprobs": before,
            "rollout_logprobs": inputs.rollout_logprobs,
            "loss_mask": loss_mask,
            "cu_seqlens": inputs.cu_seqlens,
        }
        # Outside the mask log-ratio and advantage are set to 0, so that no value there can overflow into the gradient.
        delta = torch.where(loss_mask, logprobs - policy, 0.0)  # [T]
        advantages = torch.where(loss_mask, inputs.advantages, 0.0)
        surrogate, stats = self._surrogate(
            delta=self._clamped(delta),
            logprobs=torch.where(loss_mask, logprobs, 0.0),
            advantages=advantages,
            loss_mask=loss_mask,
            cu_seqlens=inputs.cu_seqlens,
        )
        surrogate, of_weights = self._weighed(surrogate, logprobs, advantages, sides)
        loss = torch.where(loss_mask, -surrogate, 0.0)
        stats |= of_weights | {
            "train/pg_loss": mean_stat(loss, loss_mask),
            "train/entropy": mean_stat(entropy, loss_mask),
            "train/kl_old": mean_stat(-delta, loss_mask),
            **mismatch_stats(**sides),
        }
        ref = inputs.streams.get(REFERENCE) if inputs.ref_logprobs is None else inputs.ref_logprobs
        if ref is not None:
            above = torch.where(loss_mask, ref - logprobs, 0.0)  # [T]
            stats["train/kl_ref"] = mean_stat(kl_estimate(above, "k3"), loss_mask)
        if self.kl_coefficient:
            assert ref is not None, "kl_coefficient > 0 without reference log-probs"
            loss = loss + self.kl_coefficient * self._kl(above, logprobs, sides)
        if self.entropy_coefficient:
            assert entropy.requires_grad or not logprobs.requires_grad, "an entropy bonus needs entropy's gradient"
            loss = loss - self.entropy_coefficient * torch.where(loss_mask, entropy, 0.0)
        return loss, stats

    def _clamped(self, delta: Tensor) -> Tensor:
        """[T] log r, clamped; nan stays nan."""
        return delta if self.log_ratio_clamp is None else delta.clamp(-self.log_ratio_clamp, self.log_ratio_clamp)

    def _weighed(
        self, surrogate: Tensor, logprobs: Tensor, advantages: Tensor, sides: _Sides
    ) -> tuple[Tensor, dict[str, Stat]]:
        """[T] S times its weights, and their statistics."""
        stats: dict[str, Stat] = {}
        for weigher in (self.correction, self.bounds):
            if weigher is not None:
                weight, of_weights = weigher.weights(**sides)
                surrogate, stats = surrogate * weight, stats | of_weights
        if self.off_policy_delta is not None:
            dropped, of_mask = self._off_policy(logprobs, advantages, sides)
            surrogate, stats = torch.where(dropped, 0.0, surrogate), stats | of_mask
        return surrogate, stats

    def _kl(self, above: Tensor, logprobs: Tensor, sides: _Sides) -> Tensor:
        """[T] KL from [T] log p_ref - log p_train, 0 outside the mask."""
        kl = kl_estimate(above, self.kl_estimator, log_ratio_clamp=self.log_ratio_clamp, k3_clamp=self.k3_clamp)
        if not self.kl_unbiased:
            return kl
        return torch.where(sides["loss_mask"], logprobs - sides["rollout_logprobs"], 0.0).exp() * kl

    def _off_policy(self, logprobs: Tensor, advantages: Tensor, sides: _Sides) -> tuple[Tensor, dict[str, Stat]]:
        """[T] bool: tokens with S = 0. A nan mean drops no token."""
        assert self.off_policy_delta is not None
        loss_mask, cu_seqlens = sides["loss_mask"], sides["cu_seqlens"]
        gap = sides["rollout_logprobs"] - logprobs.detach()
        far = sequence_means(gap, loss_mask=loss_mask, cu_seqlens=cu_seqlens) > self.off_policy_delta  # [N]
        dropped = (advantages < 0) & to_tokens(far, cu_seqlens=cu_seqlens, tokens=len(gap))
        hit = sequence_sums(dropped.double(), loss_mask=loss_mask, cu_seqlens=cu_seqlens) > 0
        has_loss = sequence_lengths(loss_mask=loss_mask, cu_seqlens=cu_seqlens) > 0
        return dropped, {
            "train/off_policy/mask_frac": mean_stat(dropped, loss_mask),
            "train/off_policy/mask_sequence_frac": mean_stat(hit, has_loss),
        }


class _Sides(TypedDict):
    """Log-probabilities of the same tokens by trainer and rollout."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    loss_mask: Tensor
    cu_seqlens: Tensor
