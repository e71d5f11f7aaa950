"""Direct preference optimization: a policy from pairs of a preferred answer and another, without a reward model.

Letters: N samples a pack, B pairs of them, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid

from miles_like.algorithms.mismatch import mean_stat
from miles_like.algorithms.pairs import as_pairs, loss_of_pairs, mean_of, preference_stats
from miles_like.algorithms.sequences import sequence_means, sequence_sums
from miles_like.types import Stat


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoLoss:
    """With d = sum over the tokens of a sample of (log p - log p_ref), h = d_chosen - d_rejected of a pair:

    * sigmoid: -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h). e = 0 is DPO (arXiv:2305.18290, eq. 7);
      e = `label_smoothing` is its conservative form, for labels of which a share e is wrong.
    * ipo: (h' - 1 / (2 beta))^2 (arXiv:2310.12036, eq. 17), where h' is of means over tokens instead of sums, as its
      authors told trl, so that the bound does not depend on lengths. e must be 0.

    Samples 2k and 2k + 1 of a pack are a pair, the preferred first.
    """

    kind: Literal["sigmoid", "ipo"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __call__(
        self,
        *,
        logprobs: Tensor,  # [T] fp32, carries the gradient
        entropy: Tensor,  # [T] fp32
        rollout_logprobs: Tensor,  # [T]
        advantages: Tensor,  # [T]
        loss_mask: Tensor,  # [T] bool
        cu_seqlens: Tensor,  # [N+1] int32
        ref_logprobs: Tensor | None,  # [T] fp32
        old_logprobs: Tensor | None = None,  # [T]
        streams: Mapping[str, Tensor] = MappingProxyType({}),
        candidate_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, Mapping[str, Stat]]:
        """[T] the loss of each token's pair, and statistics: those of `preference_stats` with beta d as the reward,
        preference/logprob_chosen and preference/logprob_rejected (means over samples of their sum, nats), and
        train/entropy. Raises ValueError without reference log-probs, and as `as_pairs`."""
        if ref_logprobs is None:
            raise ValueError("DPO measures from reference weights: give the trainer `reference = true`")
        of = {"loss_mask": loss_mask, "cu_seqlens": cu_seqlens}
        ratios = sequence_sums(logprobs - ref_logprobs, **of)  # [N] fp64
        chosen, rejected = as_pairs(ratios)
        if self.kind == "ipo":
            first, second = as_pairs(sequence_means(logprobs - ref_logprobs, **of))
            losses = (first - second - 1 / (2 * self.beta)) ** 2
        else:
            h, e = self.beta * (chosen - rejected), self.label_smoothing
            losses = -(1 - e) * logsigmoid(h) - e * logsigmoid(-h)
        said = as_pairs(sequence_sums(logprobs.detach(), **of))
        stats = preference_stats(self.beta * chosen.detach(), self.beta * rejected.detach()) | {
            "preference/logprob_chosen": mean_of(said[0]),
            "preference/logprob_rejected": mean_of(said[1]),
            "train/entropy": mean_stat(entropy, loss_mask),
        }
        return loss_of_pairs(losses, ratios, cu_seqlens=cu_seqlens, tokens=len(logprobs)), stats
