"""Four-bit floats by the tile: what MXFP4 and NVFP4 share. The definition is `minifloat.e2m1_encode`."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.codec import Codec
from quant.lookup import e2m1_values, pack_nibbles

_ONE, _EXPONENT = 127 << 23, 0x7F800000  # bits of fp32
_TWICE_EXPONENT = (2 * (127 + 22) + 1) % 256  # as the low byte has it where e = 0


def e2m1_codes(w: Tensor, quotients: Tensor) -> Tensor:
    """Quotients fp32 of bf16 weights and positive scales, same shape, magnitudes below 200 -> uint8 codes, to nearest
    even, at most 6. Overwrites the quotients.

    The sign is that of the weight, which a zero keeps. With 2^e the power of two of a magnitude, 1, 2 or 4, the grid
    goes by 2^(e - 1). Beside 1.5 * 2^(e + 22) neighbours in fp32 are that far apart, so that adding it rounds, and
    leaves in the lowest bits the number of steps; the code is this number + 2e, and twice the exponent, odd for the
    half, is what the sum has from bit 22 on.
    """
    t = quotients.abs_()
    power = t.view(torch.int32).bitwise_and(_EXPONENT).clamp_(_ONE, _ONE + (2 << 23)).view(torch.float32)
    bits, double = t.add_(power, alpha=1.5 * 2.0**22).view(torch.int32), power.view(torch.int32)
    torch.bitwise_right_shift(bits, 22, out=double)  # memory that is in the cache: new memory is not
    code = bits.add_(double).to(torch.uint8).sub_(_TWICE_EXPONENT).clamp_(max=7)
    sign = w.view(torch.int16).bitwise_right_shift(12).bitwise_and_(8).to(torch.uint8)
    return code.bitwise_or_(sign)


class E2m1Codec(Codec):
    """Codes of `e2m1_codes`, stored two a byte, the even column in the low nibble."""

    def _pack(self, codes: Tensor) -> Tensor:
        return pack_nibbles(codes)

    def _levels(self, codes: Tensor) -> Tensor:
        return e2m1_values(pack_nibbles(codes))

    def _unpack(self, packed: Tensor) -> Tensor:
        return e2m1_values(packed)
