"""A loss of one's own: the policy gradient with importance weights that are cut off, and no clipping.

    [algorithm]
    loss = "./loss.py:Truncated"   # relative to the configuration; or, installed, my_package.objectives:Truncated

The trainer computes everything that comes in, sums the loss over `loss_mask`, weighted by algorithm.aggregation, and
divides once by the tokens of the whole step, whatever the layout: a loss never divides by anything itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from miles_like.protocols import LossFn
from miles_like.types import Reduce, Stat


class Truncated:
    """Protocol: LossFn. Made once, without arguments, and sent to every rank of the trainer: keep no state in it."""

    limit = 2.0

    def __call__(
        self,
        *,
        logprobs: Tensor,  # [T] fp32, of the labels, under the weights being trained; carries the gradient
        entropy: Tensor,  # [T] fp32
        rollout_logprobs: Tensor,  # [T] fp32, of the same labels, as they were sampled
        advantages: Tensor,  # [T] fp32
        loss_mask: Tensor,  # [T] bool: the policy's own tokens; elsewhere anything may stand
        cu_seqlens: Tensor,  # [N+1] int32: where each sample begins, for what is of whole samples
        ref_logprobs: Tensor | None,  # [T] fp32, with algorithm.kl_coefficient above 0
        old_logprobs: Tensor | None,  # [T] fp32, with several optimizer steps a rollout; None: logprobs.detach()
        streams: Mapping[str, Tensor],  # [T] or [T, C] fp32, what others say of the tokens, by name
        candidate_logprobs: Tensor | None,  # [T, C] fp32, of further tokens, where a teacher named some
    ) -> tuple[Tensor, Mapping[str, Stat]]:
        """[T] loss, 0 where not `loss_mask`, and statistics by their metric's name. Each is a total and a count, so
        that micro-batches and ranks can be added up."""
        ratio = torch.where(loss_mask, logprobs.detach() - rollout_logprobs, 0.0).exp()
        weight = ratio.clamp(max=self.limit)
        loss = torch.where(loss_mask, -weight * advantages * logprobs, 0.0)
        cut = ((ratio > self.limit) & loss_mask).float().sum()
        tokens = loss_mask.float().sum()
        return loss, {
            "train/pg_loss": Stat(loss.detach().sum(), tokens),
            "train/is_weight/trunc_frac": Stat(cut, tokens),
            "train/is_weight/max": Stat(torch.where(loss_mask, weight, 0.0).max(), tokens, Reduce.MAX),
        }


_: LossFn = Truncated()  # mypy holds it to its Protocol here
