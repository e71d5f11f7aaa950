"""Fast e2m1 codes (four-bit floats) for MXFP4 and NVFP4."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.formats.codec import Codec
from quant.formats.lookup import e2m1_values, pack_nibbles

_ONE, _EXPONENT = 127 << 23, 0x7F800000  # bits of fp32
_TWICE_EXPONENT = (2 * (127 + 22) + 1) % 256  # the low byte for e = 0


def e2m1_codes(w: Tensor, quotients: Tensor) -> Tensor:
    """fp32 quotients of bf16 weights and positive scales, same shape, magnitudes below 200 -> uint8 codes, rounded to
    nearest even, saturating at 6. Overwrites the quotients.

    The sign is that of the weight, also for zeros. With 2^e the power of two of a magnitude, 1, 2 or 4, the grid step
    is 2^(e - 1). The spacing of fp32 at 1.5 * 2^(e + 22) is the same, so adding that number rounds, and leaves the
    number of steps in the lowest bits. The code is this number + 2e; the bits of the sum from 22 on hold twice its
    exponent, plus one for the half.
    """
    t = quotients.abs_()
    power = t.view(torch.int32).bitwise_and(_EXPONENT).clamp_(_ONE, _ONE + (2 << 23)).view(torch.float32)
    bits, double = t.add_(power, alpha=1.5 * 2.0**22).view(torch.int32), power.view(torch.int32)
    torch.bitwise_right_shift(bits, 22, out=double)  # reuses memory that is in the cache
    code = bits.add_(double).to(torch.uint8).sub_(_TWICE_EXPONENT).clamp_(max=7)
    sign = w.view(torch.int16).bitwise_right_shift(12).bitwise_and_(8).to(torch.uint8)
    return code.bitwise_or_(sign)


class E2m1Codec(Codec):
    """Codes of `e2m1_codes`, stored two per byte, the even column in the low nibble."""

    def _pack(self, codes: Tensor) -> Tensor:
        return pack_nibbles(codes)

    def _levels(self, codes: Tensor) -> Tensor:
        return e2m1_values(pack_nibbles(codes))

    def _unpack(self, packed: Tensor) -> Tensor:
        return e2m1_values(packed)
