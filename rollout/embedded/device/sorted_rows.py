"""The rows of a MoE layer in the order of their experts, made on the device without reading a number from it.

Letters: T tokens, K experts per token, E experts, R = T K rows, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SortedRows:
    """ids: int64 [T, K], the experts of each token."""

    def __init__(self, ids: Tensor, experts: int) -> None:
        self._shape = ids.shape
        by_expert, self.order = torch.sort(ids.reshape(-1), stable=True)
        numbers = torch.arange(experts, device=ids.device)
        self.token = self.order // ids.shape[1]  # [R] of each row
        # int32 [E]: the row after the last of each expert
        self.ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)

    def combine(self, y: Tensor) -> Tensor:
        """y [R, D] in the order of the experts -> the sum of each token's rows, in fp32 in the order of `ids`, [T, D].
        Rows are moved and then added, because additions by index have another order in every run."""
        apart = torch.empty_like(y).index_copy_(0, self.order, y)
        return apart.view(*self._shape, -1).float().sum(1).to(y.dtype)
