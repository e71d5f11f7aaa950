"""Odds ratio preference optimization: fine-tunes on the preferred answers of pairs and lowers the odds of the others,
without reference weights.

Letters: N samples a pack, B pairs of them, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from miles_like.algorithms.pairs import as_pairs, loss_of_pairs, mean_of, preference_stats
from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.algorithms.terms.sequences import sequence_means, sequence_sums, to_tokens
from miles_like.types import ANSWER, LossInputs, LossOutput

# Largest mean log-probability whose odds are finite in fp32; above it the odds have no gradient.
_CERTAIN = -1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class OrpoLoss:
    """NLL - beta log sigmoid(log odds(chosen) - log odds(rejected)) of each pair (arXiv:2403.07691, eq. 6 and 7).

    odds = p / (1 - p), p the geometric mean of the probabilities of an answer's tokens. NLL is the mean of -log p over
    all loss tokens of the chosen sample; those of the answer have the stream ANSWER = 1. Samples 2k and 2k + 1 of a
    pack are a pair, the preferred first.
    """

    beta: float = 0.1

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] the loss of each token's pair, and statistics: those of `preference_stats` with beta times the mean of
        log p over the answer as the reward, preference/logprob_chosen and preference/logprob_rejected (means over
        samples of their sum, nats), preference/log_odds_ratio, train/nll (over loss tokens of chosen samples) and
        train/entropy (of answers). Raises ValueError as `as_pairs`."""
        logprobs, cu_seqlens = inputs.logprobs, inputs.cu_seqlens
        answer = inputs.loss_mask & (inputs.streams[ANSWER] > 0)
        nll = -sequence_means(logprobs, loss_mask=inputs.loss_mask, cu_seqlens=cu_seqlens)  # [N] fp64
        means = sequence_means(logprobs, loss_mask=answer, cu_seqlens=cu_seqlens)
        (of_chosen, _), (chosen, rejected) = as_pairs(nll), as_pairs(means)
        ratio = _log_odds(chosen) - _log_odds(rejected)
        losses = of_chosen - self.beta * logsigmoid(ratio)
        totals = as_pairs(sequence_sums(logprobs.detach(), loss_mask=answer, cu_seqlens=cu_seqlens))
        first = torch.arange(len(means), device=means.device) % 2 == 0
        preferred = to_tokens(first, cu_seqlens=cu_seqlens, tokens=len(logprobs)) & inputs.loss_mask
        stats = preference_stats(self.beta * chosen.detach(), self.beta * rejected.detach()) | {
            "preference/logprob_chosen": mean_of(totals[0]),
            "preference/logprob_rejected": mean_of(totals[1]),
            "preference/log_odds_ratio": mean_of(ratio.detach()),
            "train/nll": mean_stat(-logprobs.detach(), preferred),
            "train/entropy": mean_stat(inputs.entropy, answer),
        }
        return loss_of_pairs(losses, means, cu_seqlens=cu_seqlens, tokens=len(logprobs)), stats


def _log_odds(logprob: Tensor) -> Tensor:
    """[B] log p - log(1 - p) from log p."""
    below = logprob.clamp(max=_CERTAIN)
    return below - torch.log(-torch.expm1(below))
