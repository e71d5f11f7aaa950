"""A head with one number per token in place of the vocabulary: a critic's values, a reward model's scores.

The weight [1, H] is replicated on every tensor-parallel rank and initialized to zero: the first value of every token is
0, in every layout. It replaces megatron's output layer; in checkpoints it is `score.weight`.

Letters: P rows that a context-parallel rank feeds, s = P / tp rows of a sequence-parallel region, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_bridge.families.base import SCORE

NAME = "output_layer.weight"  # the parameter's name in the model


class ScalarHead(torch.nn.Module):
    """hidden [s, 1, H] -> [P] fp32, computed in fp32."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, sequence_parallel: bool, group: ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        # a rank's gradient covers its rows; megatron sums the gradients of parameters with this attribute over ranks
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.sequence_parallel = sequence_parallel
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        values = (hidden[:, 0].float() @ self.weight.float().t())[:, 0]
        if not self.sequence_parallel:
            return values
        # every rank computes the loss of all rows; backward keeps the gradient of this rank's rows
        return gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            values, tensor_parallel_output_grad=False, group=self.group
        )


def rename_in_checkpoint(state: Mapping[str, Any]) -> None:
    """Give the scalar head its checkpoint key in a sharded state; megatron treats it as a vocabulary's, which may be
    padded."""
    head = state.get(NAME)
    if head is not None:
        head.key, head.allow_shape_mismatch = SCORE, False


@torch.no_grad()
def zero_head(models: Sequence[Any]) -> None:
    """Zero the head of a model that was read from a checkpoint without one."""
    for model in models:
        if model.post_process:
            model.output_layer.weight.zero_()
