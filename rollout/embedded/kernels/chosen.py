"""Whether decoded tokens are attended to and drawn by the kernels of this folder, or by PyTorch."""

from __future__ import annotations

from torch import Tensor

from quant.kernels.choice import uses_triton


def by_triton(tensor: Tensor) -> bool:
    """tensor: one that a kernel would read, the cache of a layer or logits."""
    return uses_triton(tensor)
