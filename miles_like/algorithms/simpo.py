"""Simple preference optimization: preference pairs, compared by their mean log-probabilities without reference weights.

Letters: N samples a pack, B pairs of them, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from miles_like.algorithms.pairs import as_pairs, loss_of_pairs, mean_of, preference_stats
from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.algorithms.terms.sequences import sequence_means, sequence_sums
from miles_like.types import LossInputs, LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class SimpoLoss:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta (m_chosen - m_rejected) - `margin`, m the mean of log p
    over an answer's tokens (arXiv:2405.14734, eq. 6; e = `label_smoothing`, 0 there).

    Samples 2k and 2k + 1 of a pack are a pair, the preferred first.
    """

    beta: float = 2.0
    margin: float = 0.5
    label_smoothing: float = 0.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] the loss of each token's pair, and statistics: those of `preference_stats` with beta m as the reward,
        preference/logprob_chosen and preference/logprob_rejected (means over samples of their sum, nats), and
        train/entropy. Raises ValueError as `as_pairs`."""
        logprobs, loss_mask, cu_seqlens = inputs.logprobs, inputs.loss_mask, inputs.cu_seqlens
        means = sequence_means(logprobs, loss_mask=loss_mask, cu_seqlens=cu_seqlens)  # [N] fp64
        chosen, rejected = as_pairs(means)
        h, e = self.beta * (chosen - rejected) - self.margin, self.label_smoothing
        losses = -(1 - e) * logsigmoid(h) - e * logsigmoid(-h)
        totals = as_pairs(sequence_sums(logprobs.detach(), loss_mask=loss_mask, cu_seqlens=cu_seqlens))
        stats = preference_stats(self.beta * chosen.detach(), self.beta * rejected.detach()) | {
            "preference/logprob_chosen": mean_of(totals[0]),
            "preference/logprob_rejected": mean_of(totals[1]),
            "train/entropy": mean_stat(inputs.entropy, loss_mask),
        }
        return loss_of_pairs(losses, means, cu_seqlens=cu_seqlens, tokens=len(logprobs)), stats
