"""A user's loss, with the mismatch figures that every loss reports.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from miles_like.algorithms.mismatch import mismatch_stats
from miles_like.protocols import LossFn
from miles_like.types import Stat


@dataclass(frozen=True, slots=True)
class OwnLoss:
    """The loss and statistics of `loss`, and `mismatch/...` of the trainer before the rollout's first optimizer step
    against the rollout, as in `PolicyLoss`. A statistic that `loss` returns under such a name takes precedence."""

    loss: LossFn

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
        """[T] loss and statistics."""
        loss, stats = self.loss(
            logprobs=logprobs,
            entropy=entropy,
            rollout_logprobs=rollout_logprobs,
            advantages=advantages,
            loss_mask=loss_mask,
            cu_seqlens=cu_seqlens,
            ref_logprobs=ref_logprobs,
            old_logprobs=old_logprobs,
            streams=streams,
            candidate_logprobs=candidate_logprobs,
        )
        mismatch = mismatch_stats(
            old_logprobs=logprobs.detach() if old_logprobs is None else old_logprobs,
            rollout_logprobs=rollout_logprobs,
            loss_mask=loss_mask,
            cu_seqlens=cu_seqlens,
        )
        return loss, {**mismatch, **stats}
