"""What is computed of each row, or each element, by itself.

torch computes sigmoid and silu in one way in the body of a tensor and in another in what is left over at its end, so
that a value depends on where it lies; exp, sin, cos and the four operations do not. Casts are at the places where
megatron-core has them. Forward only is specified.

Letters: T rows, D columns, I width of a gated unit, R rows of experts' outputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """fp32 of fp32."""
    return 1.0 / (1.0 + torch.exp(-x))


def rmsnorm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """x [..., D]: torch's own, in fp32 and rounded once, after the weight. It goes row by row."""
    return F.rms_norm(x, (x.shape[-1],), w, eps)


def swiglu(y: Tensor, w: Tensor | None = None) -> Tensor:
    """y [T, 2I] = gate | up -> silu(gate) * up in y's dtype, times w fp32 [T, 1] when given.

    silu is rounded to y's dtype, so is the product, and so is that times w.
    """
    gate, up = y.chunk(2, -1)
    wide = gate.float()
    out = (wide / torch.exp(-wide).add_(1.0)).to(y.dtype).mul_(up)
    return out if w is None else out.mul_(w)


def combine(y: Tensor, token: Tensor, n: int) -> Tensor:
    """y [R, D] sorted by ascending expert, token [R] the row each belongs to -> sums [n, D], rounded once."""
    return torch.zeros(n, y.shape[1], dtype=torch.float32).index_add_(0, token, y.float()).to(y.dtype)
