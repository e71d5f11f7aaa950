"""Values of 8-bit and 4-bit codes, computed by bit operations that PyTorch parallelizes over its threads.

PyTorch's cast from e4m3 on CPU takes fifteen times as long, and table look-ups run on one thread. Words are little
endian: the value of lower index is in the lower bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E4M3_TO_FP16 = 2.0**8  # the biases of their exponents are 7 and 15
_E2M1_TO_FP16 = 2.0**14  # 1 and 15
_NIBBLES_TO_INT16 = (1 << 12) + (1 << 24)  # a byte times this has each nibble at the top of a 16-bit half


def e4m3_values(codes: Tensor) -> Tensor:
    """fp32 values of e4m3 codes, any dtype of one byte, any shape. NaN codes become +-480: encoders write none."""
    # the seven bits of magnitude, shifted up, are an fp16 number, also subnormal ones; the cast has copied the sign
    wide = codes.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
    bits = wide.bitwise_left_shift_(7).bitwise_and_(_signed(0xBF80, 16))
    return bits.view(torch.float16).float().mul_(_E4M3_TO_FP16)


def e2m1_values(packed: Tensor) -> Tensor:
    """uint8 [..., c] -> fp32 [..., 2c]: values of e2m1 codes, the even column in the low nibble."""
    halves = _halves(packed)
    magnitude = (halves >> 3).bitwise_and_(0x0E000E00)  # two exponent bits and one mantissa bit, placed as in fp16
    bits = halves.bitwise_and_(_signed(0x80008000, 32)).bitwise_or_(magnitude)
    return bits.view(torch.float16).float().mul_(_E2M1_TO_FP16)


def int4_values(packed: Tensor) -> Tensor:
    """uint8 [..., c] with q + 8 in each nibble -> q as fp32 [..., 2c], the even column in the low nibble."""
    bits = _halves(packed).bitwise_xor_(_signed(0x80008000, 32))  # q + 8 becomes q in two's complement
    return bits.view(torch.int16).float().mul_(2.0**-12)


def _halves(packed: Tensor) -> Tensor:
    """uint8 [..., c] -> int32 [..., c]: the low nibble in bits 12 .. 15, the high one in 28 .. 31, zeros elsewhere."""
    wide = packed.to(torch.int32, memory_format=torch.contiguous_format)
    return wide.mul_(_NIBBLES_TO_INT16).bitwise_and_(_signed(0xF000F000, 32))


def _signed(bits: int, width: int) -> int:
    return bits - (1 << width)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., 2c] below 16 -> uint8 [..., c]: even columns in the low nibble."""
    pairs = codes.contiguous().view(torch.int16)
    return pairs.bitwise_right_shift(4).bitwise_or_(pairs).to(torch.uint8)
