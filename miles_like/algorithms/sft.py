"""Supervised warm-up: negative log-likelihood of given answers.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from miles_like.algorithms.mismatch import mean_stat
from miles_like.algorithms.sequences import sequence_lengths, sequence_sums
from miles_like.types import Stat


@dataclass(frozen=True, slots=True)
class NllLoss:
    """-log p(label). Rollout, reference and old log-probabilities and advantages are not looked at."""

    def __call__(
        self,
        *,
        logprobs: Tensor,  # [T] fp32, carries the gradient
        entropy: Tensor,  # [T] fp32
        rollout_logprobs: Tensor,  # [T]
        advantages: Tensor,  # [T]
        loss_mask: Tensor,  # [T] bool
        cu_seqlens: Tensor,  # [N+1] int32
        ref_logprobs: Tensor | None = None,  # [T]
        old_logprobs: Tensor | None = None,  # [T]
        streams: Mapping[str, Tensor] = MappingProxyType({}),
        candidate_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Mapping[str, Stat]]:
        """[T] loss, 0 where not `loss_mask`, and statistics:

        * train/nll, train/entropy: means over tokens under loss, nats
        * train/answer_prob: mean over samples of the product of their label probabilities, which is the probability
          that sampling at temperature 1 gives exactly this answer. The T positions must be whole samples.
        """
        loss = torch.where(loss_mask, -logprobs, 0.0)
        answer = sequence_sums(logprobs.detach(), loss_mask=loss_mask, cu_seqlens=cu_seqlens)
        has_loss = sequence_lengths(loss_mask=loss_mask, cu_seqlens=cu_seqlens) > 0
        return loss, {
            "train/nll": mean_stat(loss, loss_mask),
            "train/entropy": mean_stat(entropy, loss_mask),
            "train/answer_prob": mean_stat(answer.exp(), has_loss),
        }
