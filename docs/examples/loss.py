"""A custom loss: the policy gradient with truncated importance weights and no clipping.

    [algorithm]
    loss = "./loss.py:Truncated"   # relative to the configuration; or, installed, my_package.objectives:Truncated

The trainer computes the inputs, sums the loss over `loss_mask`, weighted by algorithm.aggregation, and divides once by
the number of loss tokens of the whole step, whatever the layout: a loss never normalizes by a number of tokens.
"""

from __future__ import annotations

import torch

from miles_like.protocols import LossFn
from miles_like.types import LossInputs, LossOutput, Reduce, Stat


class Truncated:
    """Protocol: LossFn. Instantiated once, without arguments, and sent to every trainer rank: keep no state in it."""

    limit = 2.0

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] loss, and statistics by metric name. Each is a total and a count, which add up over micro-batches and
        ranks. `LossInputs` documents what a loss is given, with shapes; the parameter must be named `inputs`."""
        logprobs, loss_mask = inputs.logprobs, inputs.loss_mask
        ratio = torch.where(loss_mask, logprobs.detach() - inputs.rollout_logprobs, 0.0).exp()
        weight = ratio.clamp(max=self.limit)
        loss = torch.where(loss_mask, -weight * inputs.advantages * logprobs, 0.0)
        cut = ((ratio > self.limit) & loss_mask).float().sum()
        tokens = loss_mask.float().sum()
        return loss, {
            "train/pg_loss": Stat(loss.detach().sum(), tokens),
            "train/is_weight/trunc_frac": Stat(cut, tokens),
            "train/is_weight/max": Stat(torch.where(loss_mask, weight, 0.0).max(), tokens, Reduce.MAX),
        }


_: LossFn = Truncated()  # mypy holds it to its Protocol here
