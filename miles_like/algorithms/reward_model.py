"""A reward model from pairs of a preferred answer and another: Bradley and Terry's (1952) model of who is preferred.

Letters: N samples a pack, B pairs of them, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor
from torch.nn.functional import logsigmoid

from miles_like.algorithms.pairs import as_pairs, loss_of_pairs, preference_stats
from miles_like.algorithms.sequences import sequence_means
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerryLoss:
    """-log sigmoid(r_chosen - r_rejected) + c (r_chosen + r_rejected)^2 of each pair.

    The first term knows differences alone; the second, c = `center_coefficient`, keeps rewards around 0
    (arXiv:2312.09244, eq. 2). r is what the trainer's scalar head says of a sample at its label under loss, of which it
    has one: the last. Samples 2k and 2k + 1 of a pack are a pair, the preferred first.
    """

    center_coefficient: float = 0.0

    def __call__(
        self,
        *,
        logprobs: Tensor,  # [T] fp32, the scalar head's values; carries the gradient
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
        """[T] the loss of each token's pair, and the statistics of `preference_stats`. Raises ValueError as
        `as_pairs`."""
        rewards = sequence_means(logprobs, loss_mask=loss_mask, cu_seqlens=cu_seqlens)  # [N] fp64
        chosen, rejected = as_pairs(rewards)
        losses = -logsigmoid(chosen - rejected) + self.center_coefficient * (chosen + rejected) ** 2
        stats = preference_stats(chosen.detach(), rejected.detach())
        return loss_of_pairs(losses, rewards, cu_seqlens=cu_seqlens, tokens=len(logprobs)), stats
