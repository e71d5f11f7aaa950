"""The codecs' kernels, compiled for Hopper and Blackwell as they are launched: vector loads and stores, conversions by
hardware, no division for each weight, registers for enough programs to hide the memory's latency, nothing spilled.

Not covered: their rates, which a device measures (benchmarks/gpu_rates.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.triton_aot import TARGETS, Compiled, compiled

SIGNATURE = {
    "table": "*i64",
    "flags": "*i32",
    "tops": "*fp32",
    "out": "*i32",
    **dict.fromkeys(("rows", "columns", "groups", "words"), "i32:16"),
    "across": "i32",
}
REGISTERS = 65_536  # of a multiprocessor, as the next three
THREADS = 2048
PROGRAMS = 32
SHARED = 227 << 10  # bytes
IN_FLIGHT = 32 << 10  # bytes moved for each multiprocessor in 800 ns of latency: 4.8 TB/s over 132 of them
VECTOR = 16  # bytes
FORMATS = {"int4": 32, "mxfp4": 32, "nvfp4": 16}


def built(target: str, kernel: str, warps: int, **constants: Any) -> Compiled:
    import triton.language as tl

    from quant.kernels import decoders, encoders

    if "OUT" in constants:
        constants["OUT"] = getattr(tl, constants["OUT"])
    function = getattr(encoders if hasattr(encoders, kernel) else decoders, kernel)
    constants |= {"ALIGNED": True}
    return compiled(function, SIGNATURE, constants, target, num_warps=warps, enable_fp_fusion=False)


def check(found: Compiled, read: int, written: int, narrow_stores: bool = False) -> None:
    """read, written: bytes of a program."""
    assert found.spills == 0
    assert found.count("ld.global.v4") + found.count("ld.global.b128") >= read / VECTOR / found.threads
    stores = 0 if narrow_stores else written / VECTOR / found.threads
    assert found.count("st.global.v4") + found.count("st.global.b128") >= stores
    assert ".ftz" not in found.ptx, "subnormal numbers are kept"
    registers = -(-found.registers // 8) * 8 * found.threads
    together = min(REGISTERS // registers, THREADS // found.threads, PROGRAMS, SHARED // max(found.shared, 1))
    assert together * (read + written) >= IN_FLIGHT, f"{together} programs of {read + written} bytes"


BLOCK = {"BN": 128, "BK": 128, "TN": 128, "TK": 128}
SIZE = 128 * 128


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("power", [False, True], ids=["fp8", "ue8m0"])
def test_blocks_of_fp8(target: str, power: bool) -> None:
    from quant.kernels import launch

    found = built(target, "encode_blocks", launch._BLOCK_WARPS, **BLOCK, POWER=power, FAKE=False)
    check(found, 2 * SIZE, SIZE)
    each = SIZE // found.threads
    assert found.count("cvt.rn.satfinite.e4m3x2.f32") == each / 2, "two weights an instruction"
    assert found.count("div.rn.f32") == 2, "of a block: its scale and the reciprocal"
    assert found.count("fma.rn.f32") == (0 if power else 2 * each)
    check(built(target, "encode_blocks", launch._BLOCK_WARPS, **BLOCK, POWER=power, FAKE=True), 2 * SIZE, 2 * SIZE)
    decoded = built(target, "decode_blocks", launch._BLOCK_WARPS, **BLOCK, OUT="bfloat16", ROUND=True)
    check(decoded, SIZE, 2 * SIZE)
    assert decoded.count("cvt.rn.bf16x2.f32") == each / 2


@pytest.mark.parametrize("target", list(TARGETS))
def test_groups_of_mxfp8(target: str) -> None:
    from quant.kernels import launch

    size = launch._TILE
    shape = {"FORMAT": "mxfp8", "GROUP": 32, "TILE": size // 32}
    found = built(target, "encode_rows8", launch._WARPS, **shape, FAKE=False)
    check(found, 2 * size, size)
    assert found.count("cvt.rn.satfinite.e4m3x2.f32") == size / found.threads / 2
    assert not found.count("div")
    check(built(target, "decode_rows8", launch._WARPS, **shape, OUT="bfloat16", ROUND=True), size, 2 * size)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_groups_of_four_bits(target: str, fmt: str) -> None:
    from quant.kernels import launch

    size = launch._TILE
    shape = {"FORMAT": fmt, "GROUP": FORMATS[fmt], "TILE": size // FORMATS[fmt], "DIVIDES": True}
    found = built(target, "encode_rows4", launch._WARPS, **shape, FAKE=False, RAISED=False)
    check(found, 2 * size, size // 2, narrow_stores=True)
    groups = size // FORMATS[fmt] // found.threads  # of a thread, where each has whole groups
    most = {"int4": groups, "mxfp4": 0, "nvfp4": groups + 1}[fmt]
    assert found.count("div.rn.f32") <= most, "of a group, or of all, not of a weight"
    assert found.count("cvt.rn.f32.s32") == 0, "conversions of integers are slow"
    check(built(target, "encode_rows4", launch._WARPS, **shape, FAKE=True, RAISED=False), 2 * size, 2 * size)
    check(built(target, "decode_rows4", launch._WARPS, **shape, OUT="bfloat16", ROUND=True), 0, 2 * size)


@pytest.mark.parametrize("target", list(TARGETS))
def test_the_largest_magnitude(target: str) -> None:
    from quant.kernels import launch

    found = built(target, "largest", 4, TILE=launch._WORDS)
    check(found, 4 * launch._WORDS, 0)
    assert found.count("max.NaN.f32") == launch._WORDS / found.threads
