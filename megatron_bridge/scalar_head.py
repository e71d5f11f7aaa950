"""One number a token in place of the vocabulary: a critic's values, a reward model's scores.

The weight [1, H] is whole on every tensor-parallel rank and begins at zero: the first value of every token is 0, in
every layout. In megatron it stands where the vocabulary's head does; in checkpoints it is `score.weight`.

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

NAME = "output_layer.weight"  # of the parameter


class ScalarHead(torch.nn.Module):
    """hidden [s, 1, H] -> [P] fp32, computed in fp32."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, *, sequence_parallel: bool, group: ProcessGroup) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        # a rank's gradient is of its own rows; megatron adds up those of parameters that are marked so
        self.weight.sequence_parallel = self.sequence_parallel = sequence_parallel
        self.group = group

    def forward(self, hidden: Tensor) -> Tensor:
        values = (hidden[:, 0].float() @ self.weight.float().t())[:, 0]
        if not self.sequence_parallel:
            return values
        # every rank computes the loss of all rows, and takes back the gradient of its own
        return gather_from_sequence_parallel_region(  # type: ignore[no-any-return]
            values, tensor_parallel_output_grad=False, group=self.group
        )


def stored(state: Mapping[str, Any]) -> None:
    """A scalar model's sharded state gets its head's key in checkpoints; megatron takes it for a vocabulary's, which
    may be padded."""
    head = state.get(NAME)
    if head is not None:
        head.key, head.allow_shape_mismatch = SCORE, False


@torch.no_grad()
def reset(models: Sequence[Any]) -> None:
    """The head of a model that was read from a checkpoint without one."""
    for model in models:
        if model.post_process:
            model.output_layer.weight.zero_()
