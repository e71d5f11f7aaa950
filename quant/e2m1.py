"""Four-bit floats by the tile: what MXFP4 and NVFP4 share. The definition is `minifloat.e2m1_encode`."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.lookup import nibble_values, pack_nibbles
from quant.minifloat import e2m1_decode


def e2m1_codes(w: Tensor, quotients: Tensor) -> Tensor:
    """Quotients fp32 of bf16 weights and positive scales, same shape -> uint8 codes, to nearest even, at most 6.

    The sign is that of the weight, which a zero keeps. From 0 the grid goes by 1/2, from 2 by 1, from 4 by 2; each line
    of codes rounds on its own, and the least is that of the step that is in force.
    """
    t = quotients.abs()
    code = (t * 2).round_()
    torch.minimum(code, t.round().add_(2), out=code)
    torch.minimum(code, t.mul_(0.5).round_().add_(4), out=code)
    sign = w.view(torch.int16).bitwise_right_shift(12).bitwise_and_(8).to(torch.uint8)
    return code.clamp_(max=7).to(torch.uint8).bitwise_or_(sign)


def e2m1_pack(codes: Tensor) -> Tensor:
    """uint8 [..., 2c] -> uint8 [..., c]: even columns in the low nibble."""
    return pack_nibbles(codes)


def e2m1_levels(packed: Tensor) -> Tensor:
    """uint8 [..., c] -> bf16 values [..., 2c]."""
    return nibble_values(packed, e2m1_decode)
