"""The trainer's Triton kernels, compiled for Hopper and Blackwell: no spills, wide loads and stores, fast exponentials,
BF16 rounded to nearest. Not covered: times, and what the kernels compute (test_interpreted_kernels.py, tests/gpu)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from megatron_bridge.model.kernels import gathered_rows, logits, rms_norm, rope, swiglu
from tests.support.triton_aot import TARGETS, compiled

pytestmark = pytest.mark.slow
WIDE = "ld.global.v4", "st.global.v4"  # 16 bytes a thread
SHARED = 48 << 10  # bytes that every device gives a program without asking


class Case(NamedTuple):
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    instructions: tuple[str, ...]
    warps: int = 4


def _block(*outputs: str) -> dict[str, str]:
    """Types of the parameters of the kernels over a block of logits."""
    numbers = dict.fromkeys(("rows", "label_count"), "i32") | dict.fromkeys(("columns", "first", "stride"), "i32:16")
    return {"logits": "*bf16", "labels": "*i64", "temperature": "fp32", **dict.fromkeys(outputs, "*fp32"), **numbers}


def _norm(width: int, *, backward: bool) -> Case:
    rows, columns, warps = rms_norm._tile(width)
    types = {**dict.fromkeys(("x", "weight", "out", "grad", "of_x"), "*bf16"), "scales": "*fp32", "of_weight": "*fp32"}
    types |= {"rows": "i32", "each": "i32", "width": "i32:16", "eps": "fp32"}
    kernel = rms_norm.backward_kernel if backward else rms_norm.forward_kernel
    return Case(kernel, types, {"ROWS": rows, "WIDTH": columns}, (*WIDE, "cvt.rn.bf16"), warps)


def _rope(*, back: bool) -> Case:
    sizes = dict.fromkeys(("heads", "half", "token_stride", "head_stride", "size"), "i32:16")
    types = dict.fromkeys(("x", "cos", "sin", "out"), "*bf16") | sizes
    return Case(rope.rotate_kernel, types, {"BACK": back, "HEADS": 32, "HALF": 64}, (*WIDE, "cvt.rn.bf16"))


_SLOPE = _block("lse", "entropy", "grad", "of_entropy")
_SWIGLU = {**dict.fromkeys(("h", "out", "grad", "of_h"), "*bf16"), "weights": "*fp32", "of_weights": "*fp32"}
_SWIGLU |= {"rows": "i32", "width": "i32:16"}
_HALVES = dict(zip(("ROWS", "BLOCK"), swiglu.tile(768), strict=True))
_ROUNDED = (*WIDE, "ex2.approx", "cvt.rn.bf16")
CASES = {
    "sums": Case(logits.sums_kernel, _block("top", "sums"), {"BLOCK": 4096}, (WIDE[0], "ex2.approx"), 8),
    "slope": Case(logits.slope_kernel, _SLOPE, {"ENTROPY": False, "BLOCK": 2048, "label_count": 1}, _ROUNDED),
    "slope with entropy": Case(logits.slope_kernel, _SLOPE, {"ENTROPY": True, "BLOCK": 2048}, _ROUNDED),
    "SwiGLU": Case(swiglu.forward_kernel, _SWIGLU, _HALVES, _ROUNDED),
    "gradient of SwiGLU": Case(swiglu.backward_kernel, _SWIGLU, _HALVES, _ROUNDED),
    **{f"norm of {n}": _norm(n, backward=False) for n in (128, 2048, 7168)},
    **{f"gradient of the norm of {n}": _norm(n, backward=True) for n in (128, 2048, 7168)},
    "rotation": _rope(back=False),
    "rotation back": _rope(back=True),
    "sum of rows": Case(
        gathered_rows.sum_kernel,
        {"rows": "*bf16", "out": "*bf16", "places": "*i64", "ends": "*i32", "width": "i32:16"},
        {"BLOCK": 2048},
        (*WIDE, "cvt.rn.bf16"),
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_without_spills(name: str, target: str) -> None:
    case = CASES[name]
    types = {n: t for n, t in case.types.items() if n in case.kernel.arg_names}
    found = compiled(case.kernel, types, case.constants, target, num_warps=case.warps)
    missing = [i for i in case.instructions if not found.count(i)]
    assert not missing and found.spills == 0, (missing, found.spills)
    assert found.registers * found.threads <= 1 << 16, "not even one program fits a multiprocessor's registers"
    assert found.shared <= SHARED
