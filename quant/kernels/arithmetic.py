"""Arithmetic of the codecs' kernels: the bits of `quant/formats` in few instructions.

A kernel of a codec has about twenty instructions for each weight before it takes longer than its memory traffic.
`word` is an int32 with two neighbouring bf16 weights, the even column in its lower half.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quant.formats import scale_rules

_SIGN = tl.constexpr(-0x80000000)
_UPPER_HALF = tl.constexpr(-0x10000)
_EXPONENT = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_ONE = tl.constexpr(127 << 23)
_MOST = tl.constexpr(scale_rules.E2M1_MAX)
_HALF_STEP = tl.constexpr(1.5 * 2.0**22)
_ROUNDS = tl.constexpr(1.5 * 2.0**23)  # the spacing of fp32 at this number is 1: adding it rounds, ties to even
_OFFSET = tl.constexpr(8)
_TWICE_EXPONENT = tl.constexpr(2 * (127 + 22) + 1)
_NIBBLES = tl.constexpr(17)  # 1 + 16: two codes of a byte have the same offset


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
def e2m1_steps(q):
    """fp32 quotients below 200 in magnitude -> the sum of `quant.formats.e2m1.e2m1_codes`, which rounds the magnitude,
    and the number that was added."""
    t = tl.minimum(tl.abs(q), _MOST)
    power = tl.maximum(t.to(tl.int32, bitcast=True) & _EXPONENT, _ONE).to(tl.float32, bitcast=True)
    return tl.fma(power, _HALF_STEP, t), power * _HALF_STEP


@triton.jit
def e2m1_byte(word, lo, hi):
    """Quotients of the two weights of a word -> their codes in the low byte of an int32."""
    first, _ = e2m1_steps(lo)
    second, _ = e2m1_steps(hi)
    a, b = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    signs = ((word >> 12) & 0x08) | ((word >> 24) & 0x80)
    return (a + (a >> 22)) + ((b + (b >> 22)) << 4) + (signs - _TWICE_EXPONENT * _NIBBLES)


@triton.jit
def e2m1_level(w, q):
    """The value of the code of quotient q, with the sign of the weight."""
    total, added = e2m1_steps(q)
    bits = (total - added).to(tl.int32, bitcast=True) | (w.to(tl.int32, bitcast=True) & _SIGN)
    return bits.to(tl.float32, bitcast=True)


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
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126: the biases of the exponents


@triton.jit
def int4_value(nibble):
    """int32 q + 8 -> fp32 q, by the bits of 2^23 + nibble: a conversion has a quarter of an addition's rate."""
    return (nibble | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + _OFFSET)
