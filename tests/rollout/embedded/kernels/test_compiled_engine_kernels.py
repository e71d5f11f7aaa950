"""The engine's Triton kernels, compiled for Hopper and Blackwell at the sizes of shipped models: products by tensor
cores, wide loads, nothing spilled. Not covered: times, and what they compute (test_interpreted_engine_kernels.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from rollout.embedded.kernels import decode_attention, drawing
from rollout.embedded.kernels.cache_layout import CacheLayout
from tests.support.triton_aot import TARGETS, compiled

pytestmark = pytest.mark.slow
REGISTERS, SHARED = 65_536, 227 << 10  # of a multiprocessor; bytes that a program may ask for


class Case(NamedTuple):
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    instructions: tuple[str, ...]
    warps: int
    together: int  # programs that fit a multiprocessor, at least


def _attention(layout: CacheLayout, heads: int, together: int) -> Case:
    types = {**dict.fromkeys(("q", "cache"), "*bf16"), **dict.fromkeys(("key_slots", "q_start"), "*i64")}
    types |= {**dict.fromkeys(("partial", "sums"), "*fp32"), "longest": "i32", "each": "i32:16", "scale": "fp32"}
    types["width"] = "i32:16"
    wanted = ("mma.sync.aligned.m16n8k16", "ex2.approx", "st.global.v4")
    return Case(decode_attention.split_kernel, types, decode_attention.tile_of(layout, heads), wanted, 4, together)


_JOIN = {"partial": "*fp32", "sums": "*fp32", "out": "*bf16", "splits": "i32"}
_FOUND = {"tops": "*fp32", "sums": "*fp64", "places": "*i32"}
_DRAW = {"logits": "*bf16", "divisors": "*fp32", "u": "*fp64", "tokens": "*i64", "logprobs": "*fp32", **_FOUND}
_DRAW |= {"columns": "i32:16", "blocks": "i32"}
CASES = {
    "32 heads on 4 of 128": _attention(CacheLayout.of_heads(4, 128), 32, 4),
    "16 heads on 8 of 128": _attention(CacheLayout.of_heads(8, 128), 16, 4),
    "128 heads on a latent of 512 and 64": _attention(CacheLayout.of_latent(512, 64), 128, 2),
    "splits": Case(
        decode_attention.join_kernel,
        _JOIN,
        {"VALUE": 512, "SPLITS": 16, "PAD_VALUE": 512},
        ("ld.global.v4", "cvt.rn.bf16"),
        4,
        4,
    ),
    "blocks of a vocabulary": Case(
        drawing.blocks_kernel, _DRAW, {"BLOCK": drawing.BLOCK}, ("ld.global.v4", "ex2.approx", "add.f64"), 8, 3
    ),
    "draw": Case(
        drawing.draw_kernel, _DRAW, {"BLOCK": drawing.BLOCK, "BLOCKS": 64}, ("ld.global.v4", "ex2.approx"), 8, 1
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_it_compiles_without_spills(name: str, target: str) -> None:
    case = CASES[name]
    types = {n: t for n, t in case.types.items() if n in case.kernel.arg_names}
    found = compiled(
        case.kernel, types, case.constants, target, num_warps=case.warps, num_stages=decode_attention.STAGES
    )
    missing = [i for i in case.instructions if not found.count(i)]
    assert not missing and found.spills == 0, (missing, found.spills)
    fit = min(REGISTERS // (-(-found.registers // 8) * 8 * found.threads), SHARED // max(found.shared, 1))
    assert fit >= case.together, (found.registers, found.shared)
