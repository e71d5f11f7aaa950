"""User losses, of either signature, with the mismatch statistics that every loss reports.

Letters: N samples a micro-batch, T packed tokens, C candidates a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from miles_like.algorithms.terms.mismatch import mismatch_stats
from miles_like.protocols import LossFn
from miles_like.types import LossInputs, LossOutput


class KeywordLossFn(Protocol):
    """The former signature of `LossFn`: the fields of `LossInputs` as keywords. It is still accepted for a user's
    loss."""

    def __call__(
        self,
        *,
        logprobs: Tensor,
        entropy: Tensor,
        rollout_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        cu_seqlens: Tensor,
        ref_logprobs: Tensor | None,
        old_logprobs: Tensor | None,
        streams: Mapping[str, Tensor],
        candidate_logprobs: Tensor | None,
    ) -> LossOutput: ...


@dataclass(frozen=True, slots=True)
class KeywordLoss:
    """A `KeywordLossFn` as a `LossFn`."""

    loss: KeywordLossFn

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return self.loss(
            logprobs=inputs.logprobs,
            entropy=inputs.entropy,
            rollout_logprobs=inputs.rollout_logprobs,
            advantages=inputs.advantages,
            loss_mask=inputs.loss_mask,
            cu_seqlens=inputs.cu_seqlens,
            ref_logprobs=inputs.ref_logprobs,
            old_logprobs=inputs.old_logprobs,
            streams=inputs.streams,
            candidate_logprobs=inputs.candidate_logprobs,
        )


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """The loss and statistics of `loss`, and `mismatch/...` of the trainer before the rollout's first optimizer step
    against the rollout, as in `PolicyLoss`. A statistic that `loss` returns under such a name takes precedence."""

    loss: LossFn

    def __call__(self, inputs: LossInputs) -> LossOutput:
        loss, stats = self.loss(inputs)
        mismatch = mismatch_stats(
            old_logprobs=inputs.logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs,
            rollout_logprobs=inputs.rollout_logprobs,
            loss_mask=inputs.loss_mask,
            cu_seqlens=inputs.cu_seqlens,
        )
        return loss, {**mismatch, **stats}
