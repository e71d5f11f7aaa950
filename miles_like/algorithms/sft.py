"""Supervised fine-tuning: negative log-likelihood of given answers.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.algorithms.terms.sequences import sequence_lengths, sequence_sums
from miles_like.types import LossInputs, LossOutput


@dataclass(frozen=True, slots=True)
class NllLoss:
    """-log p(label). Rollout, reference and old log-probabilities and advantages are ignored."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] loss, 0 where not `loss_mask`, and statistics:

        * train/nll, train/entropy: means over loss tokens, nats
        * train/answer_prob: mean over samples of the product of their label probabilities, which is the probability
          that sampling at temperature 1 gives exactly this answer. The T positions must be whole samples.
        """
        logprobs, loss_mask, cu_seqlens = inputs.logprobs, inputs.loss_mask, inputs.cu_seqlens
        loss = torch.where(loss_mask, -logprobs, 0.0)
        answer = sequence_sums(logprobs.detach(), loss_mask=loss_mask, cu_seqlens=cu_seqlens)
        has_loss = sequence_lengths(loss_mask=loss_mask, cu_seqlens=cu_seqlens) > 0
        return loss, {
            "train/nll": mean_stat(loss, loss_mask),
            "train/entropy": mean_stat(inputs.entropy, loss_mask),
            "train/answer_prob": mean_stat(answer.exp(), has_loss),
        }
