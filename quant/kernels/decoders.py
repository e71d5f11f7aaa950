"""Triton kernels that decode stored codes and scales.

`table` int64 [B, 4]: addresses of the codes, the output and the scales, for B weights of one shape; all are contiguous.
OUT: dtype of the output, bf16 or fp32. ROUND: values are rounded to bf16 first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quant.kernels.arithmetic import divided, e2m1_value, e4m3_value, e8m0, int4_value, pointer_to

_EXACT_BELOW = tl.constexpr(2.0**60)  # of NVFP4's scales of weights: quotients and remainders are normal numbers


@triton.jit
def _store(table, at, inside, values, OUT: tl.constexpr, ROUND: tl.constexpr, ALIGNED: tl.constexpr):
    if ROUND:
        values = values.to(tl.bfloat16)
    tl.store(pointer_to(table, 1, OUT, ALIGNED) + at, values.to(OUT), mask=inside)


@triton.jit
def decode_blocks(
    table,
    rows,
    columns,
    across,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TN: tl.constexpr,
    TK: tl.constexpr,
    OUT: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """FP8 with blocks of BN x BK, as `encode_blocks` writes them."""
    i, j = tl.program_id(0) // across, tl.program_id(0) % across
    in_row, in_column = tl.arange(0, TN), tl.arange(0, TK)
    r, c = i * BN + in_row, j * BK + in_column
    inside = ((in_row < BN) & (r < rows))[:, None] & ((in_column < BK) & (c < columns))[None, :]
    at = r[:, None] * columns + c[None, :]
    codes = tl.load(pointer_to(table, 0, tl.uint8, ALIGNED) + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(pointer_to(table, 2, tl.float32, False) + tl.program_id(0))
    _store(table, at, inside, e4m3_value(codes) * scale, OUT, ROUND, ALIGNED)


@triton.jit
def _scale(table, g, some, top, FORMAT: tl.constexpr, DIVIDES: tl.constexpr):
    """fp32 multipliers of the codes' values in groups g."""
    if FORMAT == "int4":
        return tl.load(pointer_to(table, 2, tl.bfloat16, False) + g, mask=some, other=0.0).to(tl.float32)
    elif FORMAT == "fp8" or FORMAT == "fp8-ue8m0":
        return tl.load(pointer_to(table, 2, tl.float32, False) + g, mask=some, other=0.0)
    else:
        stored = tl.load(pointer_to(table, 2, tl.uint8, False) + g, mask=some, other=0).to(tl.int32)
        if FORMAT != "nvfp4":
            return e8m0(stored)
        elif DIVIDES:
            value = e4m3_value(stored)
            if top < _EXACT_BELOW:
                return divided(value, top, tl.div_rn(1.0, top))
            else:
                return tl.div_rn(value, top)
        else:
            return e4m3_value(stored) * top


@triton.jit
def decode_rows8(
    table,
    groups,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OUT: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """e4m3 codes with a scale for each GROUP columns of a row: "mxfp8" or "fp8". TILE groups a program."""
    g = tl.program_id(0) * TILE + tl.arange(0, TILE)
    at, some = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :], g < groups
    codes = tl.load(pointer_to(table, 0, tl.uint8, ALIGNED) + at, mask=some[:, None], other=0).to(tl.int32)
    scale = _scale(table, g, some, 0.0, FORMAT, False)
    _store(table, at, some[:, None], e4m3_value(codes) * scale[:, None], OUT, ROUND, ALIGNED)


@triton.jit
def decode_rows4(
    table,
    tops,
    groups,
    FORMAT: tl.constexpr,
    DIVIDES: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
    OUT: tl.constexpr,
    ROUND: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Codes of four bits with a scale for each GROUP columns of a row: "int4", "mxfp4" or "nvfp4", as `encode_rows4`
    writes them."""
    g = tl.program_id(0) * TILE + tl.arange(0, TILE)
    half: tl.constexpr = GROUP // 2
    some = g < groups
    at = g[:, None] * half + tl.arange(0, half)[None, :]
    codes = tl.load(pointer_to(table, 0, tl.uint8, ALIGNED) + at, mask=some[:, None], other=0).to(tl.int32)
    top = tl.load(tops + tl.program_id(1)) if FORMAT == "nvfp4" else 0.0
    scale = _scale(table, g, some, top, FORMAT, DIVIDES)[:, None]
    if FORMAT == "int4":
        lo, hi = int4_value(codes & 15), int4_value(codes >> 4)
    else:
        lo, hi = e2m1_value(codes & 15), e2m1_value(codes >> 4)
    whole = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    _store(table, whole, some[:, None], tl.interleave(lo * scale, hi * scale), OUT, ROUND, ALIGNED)
