"""Triton kernels that quantize bf16 weights, or round them to the values of their codes.

`table` int64 [B, 4]: addresses of the weight, its codes (with FAKE, of the rounded weight) and its scales, and the bits
of its NVFP4 scale as stored, for B weights of one shape. Weights and codes are contiguous. `flags` int32 [B] becomes 1
for a weight with NaN or infinite values. A format's rule stands in its module of `quant/formats`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quant.formats import scale_rules
from quant.kernels.arithmetic import (
    ceil_to_power_of_two,
    divided,
    e2m1_byte,
    e2m1_level,
    e4m3_nearest,
    e8m0,
    halves,
    int4_byte,
    int4_level,
    larger_bits,
    magnitudes,
    pointer_to,
)

_ABOVE_448 = tl.constexpr(scale_rules.ABOVE_448)
_E2M1_MAX = tl.constexpr(scale_rules.E2M1_MAX)
_E4M3_MAX = tl.constexpr(scale_rules.E4M3_MAX)
_FINITE = tl.constexpr(scale_rules.E4M3_FINITE)
_INFINITY = tl.constexpr(0x7F800000)
_GREATEST = tl.constexpr(scale_rules.INT4_GREATEST)
_LEAST = tl.constexpr(scale_rules.INT4_LEAST)
_LEVELS = tl.constexpr(float(scale_rules.INT4_LEVELS))
TINY = 2.0**-60  # weights whose NVFP4 scale is smaller may have subnormal multipliers
_TINY = tl.constexpr(TINY)
_RAISES = tl.constexpr(2.0**64)
_ZERO_BLOCK = tl.constexpr(scale_rules.ZERO_BLOCK_AMAX)


@triton.jit
def _fp8_scale(top, POWER: tl.constexpr):
    """fp32 scale of blocks whose amax is `top`."""
    scale = tl.div_rn(tl.maximum(top, _ZERO_BLOCK), _E4M3_MAX)
    if POWER:
        scale = ceil_to_power_of_two(scale)
    return scale


@triton.jit
def _clamped(x):
    return tl.minimum(tl.maximum(x, -_FINITE), _FINITE)


@triton.jit
def _store_e4m3(out, at, inside, q, scale, FAKE: tl.constexpr):
    codes = q.to(tl.float8e4nv)
    if FAKE:
        tl.store(out + at, (codes.to(tl.float32) * scale).to(tl.bfloat16), mask=inside)
    else:
        tl.store(out + at, codes.to(tl.uint8, bitcast=True), mask=inside)


@triton.jit
def encode_blocks(
    table,
    flags,
    rows,
    columns,
    across,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    POWER: tl.constexpr,
    FAKE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """FP8 with blocks of BN x BK, one for each program; `across` of them lie side by side. TN x TK: the block, each
    size rounded up to a power of two."""
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    in_row, in_column = tl.arange(0, TN), tl.arange(0, TK)
    r, c = i * BN + in_row, j * BK + in_column
    inside = ((in_row < BN) & (r < rows))[:, None] & ((in_column < BK) & (c < columns))[None, :]
    at = r[:, None] * columns + c[None, :]
    x = tl.load(pointer_to(table, 0, tl.bfloat16, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(flags + tl.program_id(1), 1, mask=bits >= _INFINITY)
    scale = _fp8_scale(bits.to(tl.float32, bitcast=True), POWER)
    inverse = tl.div_rn(1.0, scale)
    q = _clamped(x) * inverse if POWER else divided(x, scale, inverse)
    if FAKE:
        _store_e4m3(pointer_to(table, 1, tl.bfloat16, ALIGNED), at, inside, q, scale, True)
    else:
        _store_e4m3(pointer_to(table, 1, tl.uint8, ALIGNED), at, inside, q, scale, False)
        tl.store(pointer_to(table, 2, tl.float32, False) + tl.program_id(0), scale)


@triton.jit
def encode_rows8(
    table,
    flags,
    groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    FAKE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """e4m3 codes with a scale for each GROUP columns of a row: "mxfp8", "fp8" or "fp8-ue8m0". TILE groups a program."""
    g = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at, some = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :], g < groups
    inside = some[:, None]
    x = tl.load(pointer_to(table, 0, tl.bfloat16, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    tl.store(flags + tl.program_id(1) + tl.zeros_like(g), 1, mask=bits >= _INFINITY)
    if FORMAT == "mxfp8":
        code = tl.maximum((((bits >> 16) + _ABOVE_448) >> 7) - 8, 0)
        scale, inverse = e8m0(code), e8m0(254 - code)
    else:
        scale = _fp8_scale(bits.to(tl.float32, bitcast=True), FORMAT == "fp8-ue8m0")
        inverse = tl.div_rn(1.0, scale)
    scales, inverses = scale[:, None], inverse[:, None]
    q = divided(x, scales, inverses) if FORMAT == "fp8" else _clamped(x) * inverses
    if FAKE:
        _store_e4m3(pointer_to(table, 1, tl.bfloat16, ALIGNED), at, inside, q, scales, True)
    else:
        _store_e4m3(pointer_to(table, 1, tl.uint8, ALIGNED), at, inside, q, scales, False)
        if FORMAT == "mxfp8":
            tl.store(pointer_to(table, 2, tl.uint8, False) + g, code.to(tl.uint8), mask=some)
        else:
            tl.store(pointer_to(table, 2, tl.float32, False) + g, scale, mask=some)


@triton.jit
def _raised(whole, DIVIDES: tl.constexpr):
    """What quotients' operands are multiplied by, of a weight with the stored scale `whole`."""
    least = tl.div_rn(1.0, whole) if DIVIDES else whole
    return tl.where(least < _TINY, _RAISES, 1.0)


@triton.jit
def _nvfp4_scale(top, whole, raises, DIVIDES: tl.constexpr, RAISED: tl.constexpr):
    """Amax of groups and the stored scale of the weight -> their e4m3 scales as fp32, the multipliers of codes, and
    what quotients are computed with: the multiplier times `raises`, and the reciprocal of that."""
    x = tl.div_rn(top, _E2M1_MAX) if RAISED else divided(top, _E2M1_MAX, 1.0 / _E2M1_MAX)
    if DIVIDES:
        scale = e4m3_nearest(tl.minimum(x * whole, _E4M3_MAX))
        factor = tl.div_rn(scale, whole) if RAISED else divided(scale, whole, tl.div_rn(1.0, whole))
    else:
        scale = e4m3_nearest(tl.minimum(tl.div_rn(x, whole), _E4M3_MAX))
        factor = scale * whole
    some = factor > 0
    by = tl.where(some, factor, 1.0) * raises
    return scale, factor, by, tl.where(some, tl.div_rn(1.0, by), 0.0)


@triton.jit
def encode_rows4(
    table,
    flags,
    groups,
    FORMAT: tl.constexpr,
    DIVIDES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    FAKE: tl.constexpr,
    ALIGNED: tl.constexpr,
    RAISED: tl.constexpr,
):
    """Codes of four bits with a scale for each GROUP columns of a row: "int4", "mxfp4" or "nvfp4"; TILE groups each.
    NVFP4: a weight's scale DIVIDES the values of codes or multiplies them; RAISED: some may be subnormal."""
    g = tl.program_id(0) * TILE + tl.arange(0, TILE)
    half: tl.constexpr = GROUP // 2
    at, some = g[:, None] * half + tl.arange(0, half)[None, :], g < groups
    inside = some[:, None]
    word = tl.load(pointer_to(table, 0, tl.int32, ALIGNED) + at, mask=inside, other=0)
    lo, hi = halves(word) if FORMAT == "int4" else magnitudes(word)
    bits = tl.max(larger_bits(lo, hi), 1)
    tl.store(flags + tl.program_id(1) + tl.zeros_like(g), 1, mask=bits >= _INFINITY)
    top = bits.to(tl.float32, bitcast=True)
    if FORMAT == "mxfp4":
        code = tl.maximum((bits >> 23) - 2, 0)
        factor, inverse = e8m0(code), e8m0(254 - code)
        first, second = lo * inverse[:, None], hi * inverse[:, None]
    elif FORMAT == "int4":
        scale = tl.minimum(tl.maximum(divided(top, _LEVELS, 1.0 / _LEVELS), _LEAST), _GREATEST).to(tl.bfloat16)
        factor = scale.to(tl.float32)
        by, inverse = factor[:, None], tl.div_rn(1.0, factor)[:, None]
        first, second = divided(lo, by, inverse), divided(hi, by, inverse)
    else:
        whole = tl.load(table + tl.program_id(1) * 4 + 3).to(tl.int32).to(tl.float32, bitcast=True)
        raises = _raised(whole, DIVIDES) if RAISED else 1.0
        scale, factor, by, inverse = _nvfp4_scale(top, whole, raises, DIVIDES, RAISED)
        by, inverse = by[:, None], inverse[:, None]
        first, second = divided(lo * raises, by, inverse), divided(hi * raises, by, inverse)
    if FAKE:
        if FORMAT == "int4":
            first, second = int4_level(first), int4_level(second)
        else:
            w, v = halves(word)
            first, second = e2m1_level(w, first), e2m1_level(v, second)
        values = tl.interleave(first * factor[:, None], second * factor[:, None]).to(tl.bfloat16)
        columns = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        tl.store(pointer_to(table, 1, tl.bfloat16, ALIGNED) + columns, values, mask=inside)
    else:
        codes = int4_byte(first, second) if FORMAT == "int4" else e2m1_byte(word, first, second)
        tl.store(pointer_to(table, 1, tl.uint8, ALIGNED) + at, codes.to(tl.uint8), mask=inside)
        if FORMAT == "mxfp4":
            tl.store(pointer_to(table, 2, tl.uint8, False) + g, code.to(tl.uint8), mask=some)
        elif FORMAT == "int4":
            tl.store(pointer_to(table, 2, tl.bfloat16, False) + g, scale, mask=some)
        else:
            stored = scale.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            tl.store(pointer_to(table, 2, tl.uint8, False) + g, stored, mask=some)


@triton.jit
def largest(table, out, words, TILE: tl.constexpr, ALIGNED: tl.constexpr):
    """out int32 [B], zeros before: bits of each weight's largest magnitude as fp32. TILE words a program."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    lo, hi = halves(tl.load(pointer_to(table, 0, tl.int32, ALIGNED) + at, mask=at < words, other=0))
    tl.atomic_max(out + tl.program_id(1), tl.max(larger_bits(lo, hi), 0))
