"""Arithmetic of the codecs' kernels: the bits of `quant/formats` in few instructions.

A kernel of a codec has about twenty instructions for each weight before it takes longer than its memory traffic.
`word` is an int32 with two neighbouring bf16 weights, the even column in its lower half.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIGN = tl.constexpr(-0x80000000)
_UPPER_HALF = tl.constexpr(-0x10000)
_SIGNS = tl.constexpr(-0x7FFF8000)  # of both halves of a word
_MAGNITUDES = tl.constexpr(0x7FFF7FFF)
_TO_NIBBLES = tl.constexpr((1 << 20) + (1 << 8))  # the upper word of a product: bit 15 becomes bit 3, bit 31 bit 7
_EXPONENT = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_ROUNDS = tl.constexpr(1.5 * 2.0**23)  # the spacing of fp32 at this number is 1: adding it rounds, ties to even
_OFFSET = tl.constexpr(8)
_ROUNDS_BITS = tl.constexpr(0x4B400000)
_E2M1_UNIT = tl.constexpr(2.0**126)  # the biases of the exponents are 1 and 127


@triton.jit
def pointer_to(table, column: tl.constexpr, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(table + tl.program_id(1) * 4 + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def halves(word):
    """The two weights as fp32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & _UPPER_HALF).to(tl.float32, bitcast=True)


@triton.jit
def magnitudes(word):
    return halves(word & _MAGNITUDES)


@triton.jit
def larger_bits(lo, hi):
    """Bits of the larger magnitude, above those of infinity where one is NaN."""
    return tl.maximum(tl.abs(lo), tl.abs(hi), propagate_nan=tl.PropagateNan.ALL).to(tl.int32, bitcast=True)


@triton.jit
def divided(x, by, inverse):
    """x / by in three instructions instead of eight. inverse: 1 / by, rounded to nearest.

    Rounded as by IEEE division where 1 / by, quotient and remainder are normal numbers and a code depends on it:
    tests/support/triton_division.py has all such pairs of a bf16 weight and a scale. The remainder is negated twice so
    that -0 / by is -0; Triton's unary minus is 0 - x, while a factor of -1 becomes the sign of an operand.
    """
    q = x * inverse
    return tl.fma(tl.fma(q, by, x * -1.0) * -1.0, inverse, q)


@triton.jit
def ceil_to_power_of_two(s):
    bits = s.to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
    return (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def e8m0(code):
    """int32 codes -> 2^(code - 127)."""
    bits = tl.where(code == 255, _NAN, tl.maximum(code << 23, 0x400000))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_nearest(x):
    """fp32 from 0 to 448 -> the nearest e4m3 number, ties to even, as fp32."""
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & _EXPONENT, 121 << 23)  # the least normal number is 2^-6
    rounds = (exponent + (20 << 23)).to(tl.float32, bitcast=True) * 1.5  # with three bits of mantissa
    return (x + rounds) - rounds


@triton.jit
def e4m3_value(code):
    """int32 codes -> fp32; NaN codes become +-480 as in `e4m3_values`."""
    bits = ((code & 0x7F) << 20) | ((code & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120: the biases of the exponents


@triton.jit
def e2m1_code(t):
    """fp32 magnitudes below 200 -> int32 whose three lowest bits are their codes.

    code = round(min(2 t, t + 2, t / 2 + 4, 7)), a half to the even code: at the values 0, 1/2, 1, 3/2, 2, 3, 4, 6 the
    least of the lines is the code, and between them it is straight. Each line is rounded once, as it is computed.
    """
    small = tl.fma(t, 2.0, _ROUNDS).to(tl.int32, bitcast=True)
    middle = (t + (_ROUNDS + 2.0)).to(tl.int32, bitcast=True)
    large = tl.fma(t, 0.5, _ROUNDS + 4.0).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(small, middle), tl.minimum(large, _ROUNDS_BITS + 7))


@triton.jit
def e2m1_byte(word, lo, hi):
    """Magnitudes of the quotients of the two weights of a word -> their codes in the low byte of an int32."""
    signs = tl.umulhi((word & _SIGNS).to(tl.uint32, bitcast=True), _TO_NIBBLES).to(tl.int32, bitcast=True)
    return e2m1_code(lo) + (e2m1_code(hi) << 4) + signs


@triton.jit
def e2m1_level(w, t):
    """The value of the code of the quotient with magnitude t, with the sign of the weight."""
    bits = ((e2m1_code(t) & 7) << 22) | (w.to(tl.int32, bitcast=True) & _SIGN)
    return bits.to(tl.float32, bitcast=True) * _E2M1_UNIT


@triton.jit
def int4_byte(lo, hi):
    """Quotients -> q + 8 of each in the low byte of an int32."""
    a, b = (lo + (_ROUNDS + _OFFSET)).to(tl.int32, bitcast=True), (hi + (_ROUNDS + _OFFSET)).to(tl.int32, bitcast=True)
    return a + (b << 4)


@triton.jit
def int4_level(q):
    return (q + _ROUNDS) - _ROUNDS


@triton.jit
def e2m1_value(nibble):
    """int32 codes below 16 -> fp32."""
    bits = ((nibble & 7) << 22) | ((nibble & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _E2M1_UNIT


@triton.jit
def int4_value(nibble):
    """int32 q + 8 -> fp32 q, by the bits of 2^23 + nibble: a conversion has a quarter of an addition's rate."""
    return (nibble | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + _OFFSET)
