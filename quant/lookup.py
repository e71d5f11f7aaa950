"""Codes of 8 and 4 bits to values, by their bits, in operations that PyTorch splits between its threads and does well.

Its own cast of e4m3 on CPU takes fifteen times as long, and look-ups in a table run on one thread. Words are little
endian: the value of lower index is in the lower bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

_E4M3_TO_FP16 = 2.0**8  # the biases of their exponents are 7 and 15
_E2M1_TO_FP16 = 2.0**14  # 1 and 15
_NIBBLES_TO_INT16 = (1 << 12) + (1 << 24)  # a byte times this has each nibble at the top of a 16-bit half


def e4m3_values(codes: Tensor) -> Tensor:
    """fp32 of e4m3 codes, any dtype of one byte, any shape. Codes that are NaN become +-480: none are written."""
    # seven bits of magnitude, moved up, are an fp16 number, subnormal ones too; the sign was copied on the way
    wide = codes.view(torch.int8).to(torch.int16, memory_format=torch.contiguous_format)
    bits = wide.bitwise_left_shift_(7).bitwise_and_(_signed(0xBF80, 16))
    return bits.view(torch.float16).float().mul_(_E4M3_TO_FP16)


def e2m1_values(packed: Tensor) -> Tensor:
    """fp32 [..., 2c] of the e2m1 codes in uint8 [..., c], the even one in the low nibble."""
    halves = _halves(packed)
    magnitude = (halves >> 3).bitwise_and_(0x0E000E00)  # sign, two bits of exponent and one of mantissa as in fp16
    bits = halves.bitwise_and_(_signed(0x80008000, 32)).bitwise_or_(magnitude)
    return bits.view(torch.float16).float().mul_(_E2M1_TO_FP16)


def int4_values(packed: Tensor) -> Tensor:
    """fp32 [..., 2c] of q in uint8 [..., c] that holds q + 8 in each nibble, the even one in the low nibble."""
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
