"""Operations on single rows or elements.

torch computes sigmoid and silu differently in the body of a tensor and in the remainder at its end, so a value depends
on its place; exp, sin, cos and the four basic operations do not. Casts are at the same places as in megatron-core. Only
the forward pass is specified.

Letters: T rows, D columns, I width of a gated unit, R rows of experts' outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """fp32 -> fp32."""
    return 1.0 / (1.0 + torch.exp(-x))


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x [..., D]: torch's rms_norm, in fp32, rounded once after the weight; each row depends on itself only."""
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def swiglu(y: Tensor, w: Tensor | None = None) -> Tensor:
    """y [T, 2I] = gate | up -> silu(gate) * up in y's dtype, times w fp32 [T, 1] if given.

    silu, the product and its product with w are each rounded to y's dtype.
    """
    gate, up = y.chunk(2, -1)
    wide = gate.float()
    out = (wide / torch.exp(-wide).add_(1.0)).to(y.dtype).mul_(up)
    return out if w is None else out.mul_(w)


def combine(y: Tensor, token: Tensor, n: int) -> Tensor:
    """y [R, D] sorted by ascending expert, token [R] the row of each -> sums [n, D], rounded once."""
    return torch.zeros(n, y.shape[1], dtype=torch.float32).index_add_(0, token, y.float()).to(y.dtype)
