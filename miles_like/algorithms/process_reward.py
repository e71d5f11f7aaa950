"""Process reward models: a scalar head that says of each reasoning step whether it is right.

Letters: N samples a pack, T packed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from miles_like.algorithms.terms.mismatch import mean_stat
from miles_like.types import STEP_LABEL, LossInputs, LossOutput


@dataclass(frozen=True, slots=True)
class ProcessRewardLoss:
    """-y log sigmoid(v) - (1 - y) log sigmoid(-v) of each step (arXiv:2305.20050, where y is 0 or 1; arXiv:2312.08935
    has shares of right continuations).

    v is the trainer's scalar head at the last token of the step, y the stream STEP_LABEL in [0, 1]; loss tokens are the
    labels of those tokens.
    """

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """[T] loss, 0 where not `loss_mask`, and statistics over steps:

        * process/accuracy: share with v > 0 where y > 1/2 and v <= 0 elsewhere
        * process/value_right, process/value_wrong: mean v of steps with y > 1/2, of the others
        """
        mask, values = inputs.loss_mask, inputs.logprobs
        labels = torch.where(mask, inputs.streams[STEP_LABEL], 0.0).to(values.dtype)
        kept = torch.where(mask, values, 0.0)
        loss = torch.where(mask, binary_cross_entropy_with_logits(kept, labels, reduction="none"), 0.0)
        right, seen = labels > 0.5, kept.detach()
        return loss, {
            "process/accuracy": mean_stat((seen > 0) == right, mask),
            "process/value_right": mean_stat(seen, mask & right),
            "process/value_wrong": mean_stat(seen, mask & ~right),
        }
