"""The stored tensors of a quantized weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Last component of a stored name -> dtype and shape."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A quantized weight as a checkpoint stores it."""

    stored: Mapping[str, Tensor]  # last component of the stored name, in the order of the file -> tensor
    shape: tuple[int, ...]  # of the decoded weight

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.stored.values())


@dataclass(frozen=True, slots=True)
class PerBlock:
    """A stored tensor with one element per block of `rows` x `columns` elements of the weight."""

    dtype: torch.dtype
    rows: int = 1
    columns: int = 1


@dataclass(frozen=True, slots=True)
class PerWeight:
    """A stored tensor of fixed shape that applies to the whole weight."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()
