"""Bit-exact rounding to small floats in plain torch: the reference that each cast of `quant.formats` is tested against.

`quant/formats/minifloat.py` describes the formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

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


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def e2m1_encode(x: Tensor) -> Tensor:
    """Codes of fp32 `x`, below 16: nearest, ties to even, saturating at +-6; -0 keeps its sign. Any shape -> uint8.

    Raises ValueError for NaN, which the format lacks.
    """
    if bool(torch.isnan(x).any()):
        raise ValueError("E2M1 has no NaN: encode finite values")
    grid = torch.tensor(_E2M1, device=x.device)
    middle = (grid[1:] + grid[:-1]) / 2
    t = x.to(torch.float32).abs()[..., None]
    upper_is_even = torch.arange(1, 8, device=x.device) % 2 == 0  # of the two codes beside a midpoint
    code = torch.where(upper_is_even, t >= middle, t > middle).sum(-1)
    return (code + 8 * torch.signbit(x)).to(torch.uint8)


def e2m1_decode(codes: Tensor) -> Tensor:
    """Values of uint8 `codes` below 16, fp32, same shape."""
    value = torch.tensor(_E2M1, device=codes.device)[(codes & 7).long()]
    return torch.where((codes & 8) != 0, -value, value)


def e8m0_encode(x: Tensor, *, up: bool) -> Tensor:
    """Codes of the nearest power of two not below fp32 `x` (`up`) or not above, 0 .. 254; uint8, same shape.

    Computed from the bits: log2 in fp32 is wrong next to powers of two. `x` is finite and not negative; zero has code
    0.
    """
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    beyond = torch.where(exponent > 0, mantissa > 0, mantissa > 0x400000)  # 2^-127 is subnormal in fp32
    code = exponent + beyond.to(torch.int32) if up else exponent
    return code.clamp(max=254).to(torch.uint8)
