"""Direct preference optimization: trains a policy on preference pairs, without a reward model.

Letters: N samples a pack, B pairs of them, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.nn.functional import logsigmoid

from miles_like.algorithms.pairs import as_pairs, loss_of_pairs, mean_of, preference_stats
from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.algorithms.terms.sequences import sequence_means, sequence_sums
from miles_like.types import LossInputs, LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoLoss:
    """With d = sum over the tokens of a sample of (log p - log p_ref), h = d_chosen - d_rejected of a pair:

    * sigmoid: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h). e = 0 is DPO (arXiv:2305.18290, eq. 7);
      e = `label_smoothing` is its conservative form, for labels of which a share e is wrong.
    * ipo: (h' - 1 / (2 beta))^2 (arXiv:2310.12036, eq. 17), where h' is of means over tokens instead of sums, as in trl
      on its authors' advice, so that the bound does not depend on lengths. e must be 0.

    Samples 2k and 2k + 1 of a pack are a pair, the preferred first.
    """

    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] the loss of each token's pair, and statistics: those of `preference_stats` with beta d as the reward,
        preference/logprob_chosen and preference/logprob_rejected (means over samples of their sum, nats), and
        train/entropy. Raises ValueError without reference log-probs, and as `as_pairs`."""
        if inputs.ref_logprobs is None:
            raise ValueError("DPO needs reference log-probs: set the trainer's `reference = true`")
        logprobs, loss_mask, cu_seqlens = inputs.logprobs, inputs.loss_mask, inputs.cu_seqlens
        above = logprobs - inputs.ref_logprobs  # [T]
        ratios = sequence_sums(above, loss_mask=loss_mask, cu_seqlens=cu_seqlens)  # [N] fp64
        chosen, rejected = as_pairs(ratios)
        if self.kind == "ipo":
            first, second = as_pairs(sequence_means(above, loss_mask=loss_mask, cu_seqlens=cu_seqlens))
            losses = (first - second - 1 / (2 * self.beta)) ** 2
        else:
            h, e = self.beta * (chosen - rejected), self.label_smoothing
            losses = -(1 - e) * logsigmoid(h) - e * logsigmoid(-h)
        totals = as_pairs(sequence_sums(logprobs.detach(), loss_mask=loss_mask, cu_seqlens=cu_seqlens))
        stats = preference_stats(self.beta * chosen.detach(), self.beta * rejected.detach()) | {
            "preference/logprob_chosen": mean_of(totals[0]),
            "preference/logprob_rejected": mean_of(totals[1]),
            "train/entropy": mean_stat(inputs.entropy, loss_mask),
        }
        return loss_of_pairs(losses, ratios, cu_seqlens=cu_seqlens, tokens=len(logprobs)), stats
