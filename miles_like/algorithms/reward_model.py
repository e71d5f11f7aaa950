"""Reward model training on preference pairs with the model of Bradley and Terry (1952).

Letters: N samples a pack, B pairs of them, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.nn.functional import logsigmoid

from miles_like.algorithms.pairs import as_pairs, loss_of_pairs, preference_stats
from miles_like.algorithms.terms.sequences import sequence_means
from miles_like.types import LossInputs, LossOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerryLoss:
    """-log sigmoid(r_chosen - r_rejected) + c (r_chosen + r_rejected)^2 of each pair.

    The first term depends on differences only; the second, c = `center_coefficient`, keeps rewards around 0
    (arXiv:2312.09244, eq. 2). r is the trainer's scalar head at the sample's one label with loss, the last. Samples 2k
    and 2k + 1 of a pack are a pair, the preferred first.
    """

    center_coefficient: float = 0.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] the loss of each token's pair, and the statistics of `preference_stats`. Raises ValueError as
        `as_pairs`."""
        cu_seqlens = inputs.cu_seqlens
        rewards = sequence_means(inputs.logprobs, loss_mask=inputs.loss_mask, cu_seqlens=cu_seqlens)  # [N] fp64
        chosen, rejected = as_pairs(rewards)
        losses = -logsigmoid(chosen - rejected) + self.center_coefficient * (chosen + rejected) ** 2
        stats = preference_stats(chosen.detach(), rejected.detach())
        return loss_of_pairs(losses, rewards, cu_seqlens=cu_seqlens, tokens=len(inputs.logprobs)), stats
