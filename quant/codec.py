"""The `Codec` protocol and the one quantized value type.

A codec is the only place where its format is encoded or decoded: checkpoint conversion, the trainer's fake quantization
and weight publication all call it, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class QuantTensor:
    """A quantized weight as a checkpoint stores it."""

    codes: Tensor  # stored under the weight's own name
    scales: Mapping[str, Tensor]  # suffix put after the weight's name (e.g. "_scale_inv") -> tensor
    shape: tuple[int, ...]  # of the decoded weight

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + sum(s.nbytes for s in self.scales.values())


class Codec(Protocol):
    def encode(self, bundle: Mapping[str, Tensor]) -> Mapping[str, QuantTensor]:
        """Names that must share a scale come in one bundle (NVFP4 gate and up); otherwise it has one entry.

        Raises ValueError naming the tensor when a weight is not finite or has a shape the format cannot hold.
        """

    def decode(self, q: QuantTensor, dtype: torch.dtype = torch.float32) -> Tensor: ...

    def decode_stack(self, qs: Sequence[QuantTensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """Tensors of one shape -> [B, ...], each exactly as `decode` gives it; many small ones cost one call."""

    def bundle_of(self, name: str) -> frozenset[str]:
        """All names that must be encoded together with `name`, itself included."""
