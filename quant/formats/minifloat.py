"""Small floats, and the values of E8M0 codes.

E4M3 ("fn": finite, no infinities) is 1 sign, 4 exponent (bias 7) and 3 mantissa bits: normal 2^-6 .. 448, subnormal
multiples of 2^-9, NaN 0x7F and 0xFF (OCP 8-bit Floating Point Specification, section 5).

E2M1 is 1 sign, 2 exponent (bias 1) and 1 mantissa bit: 0, 1/2, 1, 3/2, 2, 3, 4, 6 and their negatives, neither NaN nor
infinity. E8M0 has no sign and no zero: code b is 2^(b - 127), 0xFF is NaN (OCP Microscaling Formats, section 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

E8M0_NAN = 0xFF


def e8m0_decode(codes: Tensor) -> Tensor:
    """Values of uint8 `codes`, fp32, same shape."""
    value = (codes.to(torch.int32) << 23).clamp(min=0x400000).view(torch.float32)  # 2^-127 has exponent bits of 0
    return torch.where(codes == E8M0_NAN, torch.nan, value)
