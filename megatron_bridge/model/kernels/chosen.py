"""Which way each part of a step is computed, and which way it was: by a kernel for CUDA devices or by plain PyTorch.

Fake tensors, whose memory the plan is compared with, take the plain way. It lacks one temporary: the copy of a layer's
weights for a grouped product, as large as the gradients that backward has in their place.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from quant.kernels.choice import uses_triton

_taken: dict[str, bool] = {}


def by_triton(part: str, tensor: Tensor) -> bool:
    """Whether `part` is computed on `tensor` by a Triton kernel."""
    return note(part, tensor, uses_triton(tensor))


def note(part: str, tensor: Tensor, fused: bool) -> bool:
    """`fused`, the choice for `part` on `tensor`, which is false for fake tensors."""
    _taken[part] = fused = fused and not isinstance(tensor, FakeTensor)
    return fused


def fused_parts() -> dict[str, bool]:
    """Part -> whether a kernel for CUDA devices computed it the last time, of the parts that were computed since
    the call before."""
    found = dict(_taken)
    _taken.clear()
    return found
