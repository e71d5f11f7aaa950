"""The codecs' kernels, compiled for Hopper and Blackwell: vector loads and stores, conversions by hardware, no division
for each weight, registers for enough programs to hide the memory's latency, nothing spilled.

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
REGISTERS = 65_536  # of a multiprocessor
SHARED = 227 << 10  # bytes that its programs can have
IN_FLIGHT = 32 << 10  # bytes moved for each multiprocessor in 800 ns of latency: 4.8 TB/s over 132 of them
FORMATS = {"int4": 32, "mxfp4": 32, "nvfp4": 16}


def built(target: str, kernel: str, warps: int, **constants: Any) -> Compiled:
    import triton.language as tl

    from quant.kernels import decoders, encoders

    if "OUT" in constants:
        constants["OUT"] = getattr(tl, constants["OUT"])
    function = getattr(encoders if hasattr(encoders, kernel) else decoders, kernel)
    constants |= {"ALIGNED": True}
    return compiled(function, SIGNATURE, constants, target, num_warps=warps, enable_fp_fusion=False)


def check(found: Compiled, read: int, written: int, loads: int, stores: int) -> None:
    """read, written: bytes of a program; loads, stores: of 16 bytes, of a thread."""
    assert found.spills == 0
    assert found.count("ld.global.v4") + found.count("ld.global.b128") >= loads
    assert found.count("st.global.v4") + found.count("st.global.b128") >= stores
    assert ".ftz" not in found.ptx, "subnormal numbers are kept"
    together = min(REGISTERS // (found.registers * found.threads), 2048 // found.threads)
    together = min(together, SHARED // max(found.shared, 1))
    assert together * (read + written) >= IN_FLIGHT, f"{together} programs of {read + written} bytes"


BLOCK = {"BN": 128, "BK": 128, "TN": 128, "TK": 128}


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("power", [False, True], ids=["fp8", "ue8m0"])
def test_blocks_of_fp8(target: str, power: bool) -> None:
    found = built(target, "encode_blocks", 8, **BLOCK, POWER=power, FAKE=False)
    check(found, 2 * 128 * 128, 128 * 128, loads=8, stores=4)
    assert found.count("cvt.rn.satfinite.e4m3x2.f32") == 128 * 128 // 256 // 2, "two weights an instruction"
    assert found.count("div.rn.f32") == 2, "of a block: its scale and the reciprocal"
    assert found.count("fma.rn.f32") == (0 if power else 2 * 64)
    decoded = built(target, "decode_blocks", 8, **BLOCK, OUT="bfloat16", ROUND=True)
    check(decoded, 128 * 128, 2 * 128 * 128, loads=4, stores=8)
    assert decoded.count("cvt.rn.bf16x2.f32") == 32


@pytest.mark.parametrize("target", list(TARGETS))
def test_groups_of_mxfp8(target: str) -> None:
    shape = {"FORMAT": "mxfp8", "GROUP": 32, "TILE": 128}
    found = built(target, "encode_rows8", 4, **shape, FAKE=False)
    check(found, 8192, 4096, loads=4, stores=2)
    assert found.count("cvt.rn.satfinite.e4m3x2.f32") == 16 and not found.count("div")
    check(built(target, "decode_rows8", 4, **shape, OUT="bfloat16", ROUND=True), 4096, 8192, loads=2, stores=4)


@pytest.mark.parametrize("target", list(TARGETS))
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_groups_of_four_bits(target: str, fmt: str) -> None:
    shape = {"FORMAT": fmt, "GROUP": FORMATS[fmt], "TILE": 4096 // FORMATS[fmt], "DIVIDES": True}
    found = built(target, "encode_rows4", 4, **shape, FAKE=False, RAISED=False)
    check(found, 8192, 2048, loads=4, stores=0)
    groups = 4096 // FORMATS[fmt] // 128  # of a thread, where each has whole groups
    assert found.count("div.rn.f32") <= {"int4": 2, "mxfp4": 0, "nvfp4": 3}[fmt] * groups, "of a group, not of a weight"
    assert found.count("cvt.rn.f32.s32") == 0, "conversions of integers are slow"
    check(built(target, "decode_rows4", 4, **shape, OUT="bfloat16", ROUND=True), 2048, 8192, loads=0, stores=4)


@pytest.mark.parametrize("target", list(TARGETS))
def test_the_largest_magnitude(target: str) -> None:
    found = built(target, "largest", 4, TILE=4096)
    check(found, 4 * 4096, 0, loads=8, stores=0)
    assert found.count("max.NaN.f32") == 4096 // 128
