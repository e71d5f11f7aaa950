"""Kahneman-Tversky optimization: trains a policy on answers that are marked desirable or not, without pairs.

Letters: N samples a pack, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.algorithms.terms.sequences import sequence_lengths, sequence_means, sequence_sums, to_tokens
from miles_like.types import DESIRABLE, KL_BASELINE, LossInputs, LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class KtoLoss:
    """With d = sum over the tokens of a sample of (log p - log p_ref) and z the step's baseline
    (miles_like/supervised/baseline.py), which has no gradient (arXiv:2402.01306, eq. 8):

    * of a desirable sample: `desirable_weight` (1 - sigmoid(beta (d - z)))
    * of any other: `undesirable_weight` (1 - sigmoid(beta (z - d)))

    The stream DESIRABLE is 1 or 0 and KL_BASELINE is z at each token of a sample.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] the loss of each token's sample, and statistics:

        * preference/accuracy: share of samples with d > z if desirable, d <= z if not
        * preference/reward_chosen, preference/reward_rejected: means of beta d over desirable samples and over others
        * preference/logprob_chosen, preference/logprob_rejected: means of the sum of log p, nats
        * preference/kl_baseline: z, nats
        * train/entropy

        Raises ValueError without reference log-probs.
        """
        if inputs.ref_logprobs is None:
            raise ValueError("KTO needs reference log-probs: set the trainer's `reference = true`")
        logprobs = inputs.logprobs
        at = {"loss_mask": inputs.loss_mask, "cu_seqlens": inputs.cu_seqlens}
        ratios = sequence_sums(logprobs - inputs.ref_logprobs, **at)  # [N] fp64
        baseline = sequence_means(inputs.streams[KL_BASELINE], **at)
        desirable = sequence_means(inputs.streams[DESIRABLE], **at) > 0.5
        kept = sequence_lengths(**at) > 0
        sign = torch.where(desirable, 1.0, -1.0)
        weight = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        losses = torch.where(kept, weight * torch.sigmoid(-self.beta * sign * (ratios - baseline)), 0.0 * ratios)
        totals, rewards = sequence_sums(logprobs.detach(), **at), self.beta * ratios.detach()
        good, bad = kept & desirable, kept & ~desirable
        stats = {
            "preference/accuracy": mean_stat((ratios.detach() > baseline) == desirable, kept),
            "preference/reward_chosen": mean_stat(rewards, good),
            "preference/reward_rejected": mean_stat(rewards, bad),
            "preference/logprob_chosen": mean_stat(totals, good),
            "preference/logprob_rejected": mean_stat(totals, bad),
            "preference/kl_baseline": mean_stat(baseline, kept),
            "train/entropy": mean_stat(inputs.entropy, inputs.loss_mask),
        }
        return to_tokens(losses, cu_seqlens=inputs.cu_seqlens, tokens=len(logprobs)).float(), stats
