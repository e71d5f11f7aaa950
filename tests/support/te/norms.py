"""RMSNorm of TransformerEngine's extension in PyTorch: FP32 inside, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.support.te.dtypes import torch_dtype


def rmsnorm_fwd(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[Any, None, Tensor]:
    """(normed x [n, h], None, 1 / root mean square [n] fp32)."""
    wide = x.float()
    rsigma = torch.rsqrt(wide.square().mean(-1) + eps)
    gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
    found: Any = (wide * rsigma[:, None] * gamma).to(torch_dtype(dtype))
    if quantizer is not None:
        return quantizer(found), None, rsigma
    if out is not None:
        found = out.copy_(found)
    return found, None, rsigma


def rmsnorm_bwd(
    grad: Tensor, x: Tensor, rsigma: Tensor, weight: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, in their dtypes."""
    grad = grad.reshape(x.shape)
    gamma = weight.float() + 1 if zero_centered_gamma else weight.float()
    normed = x.float() * rsigma[:, None]
    scaled = grad.float() * gamma
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * rsigma[:, None]
    return dx.to(x.dtype), (grad.float() * normed).sum(0).to(weight.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {"rmsnorm_fwd": rmsnorm_fwd, "rmsnorm_bwd": rmsnorm_bwd}
