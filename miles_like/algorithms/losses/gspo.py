"""Group sequence policy optimization: one ratio per sample.

Letters: N samples a micro-batch, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.terms.sequences import sequence_means, to_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoLoss(ClippedLoss):
    """The clipped surrogate, where r of each token is its sample's geometric mean, exp(mean over its tokens of log
    p_train - log p_old), with its gradient (GSPO, arXiv:2507.18071 eq. 5 to 7).

    Each token of a sample has the sample's surrogate: with aggregation "sequence_mean" it counts once, as in the paper.
    `log_ratio_clamp` bounds the sample's log-ratio from above, as in verl, not those of its tokens.
    """

    def _clamped(self, delta: Tensor) -> Tensor:
        return delta

    def _ratio(self, delta: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
        of_sample = sequence_means(delta, loss_mask=loss_mask, cu_seqlens=cu_seqlens).to(delta.dtype)
        if self.log_ratio_clamp is not None:
            of_sample = of_sample.clamp(max=self.log_ratio_clamp)
        return to_tokens(of_sample, cu_seqlens=cu_seqlens, tokens=len(delta)).exp()
