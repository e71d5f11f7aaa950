"""Bit-exact rounding to small floats in plain torch: what every cast is tested against.

E4M3 ("fn": finite, no infinities) is 1 sign, 4 exponent (bias 7) and 3 mantissa bits: normal 2^-6 .. 448, subnormal
multiples of 2^-9, NaN 0x7F and 0xFF (OCP 8-bit Floating Point Specification, section 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
_SIGN, _NAN, _LARGEST = 0x80, 0x7F, 0x7E
_MIN_EXPONENT = -6  # of a normal e4m3 number; below it the step stays 2^-9


def e4m3_encode(x: Tensor) -> Tensor:
    """Codes of fp32 `x`: nearest, ties to even, saturating at +-448; -0 and NaN keep their sign. Any shape -> uint8."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    sign = (bits >> 24) & _SIGN
    magnitude = bits & 0x7FFFFFFF
    exponent = ((magnitude >> 23) - 127).clamp(min=_MIN_EXPONENT)
    # |x| in steps of the e4m3 grid around it; a product with a power of two is exact
    step_inverse = ((3 - exponent + 127) << 23).view(torch.float32)
    steps = torch.round(magnitude.view(torch.float32) * step_inverse)  # half to even
    steps = torch.where(torch.isfinite(steps), steps, 0.0).to(torch.int32)  # 0..16; 16 carries into the exponent
    code = ((exponent - _MIN_EXPONENT) * 8 + steps).clamp(max=_LARGEST)
    code = torch.where(torch.isnan(x), _NAN, torch.where(torch.isinf(x), _LARGEST, code))
    return (code | sign).to(torch.uint8)


def e4m3_decode(codes: Tensor) -> Tensor:
    """Values of uint8 `codes`, fp32, same shape."""
    c = codes.to(torch.int32)
    exponent, mantissa = (c >> 3) & 15, c & 7
    steps = torch.where(exponent > 0, mantissa + 8, mantissa).to(torch.float32)
    step = ((exponent.clamp(min=1) - 7 - 3 + 127) << 23).view(torch.float32)
    value = torch.where((c & _NAN) == _NAN, torch.nan, steps * step)
    return torch.where((c & _SIGN) != 0, -value, value)
