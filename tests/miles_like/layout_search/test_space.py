"""Divisions of ranks: complete, accepted by the model's own check, and refused by it where they are left out.

Not covered: whether a division is fast.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from megatron_bridge.config import ParallelConfig
from megatron_bridge.plan.layout import check_layout
from miles_like.layout_search.space import (
    CONTEXT,
    DEEPEST,
    EXPERT_TENSOR,
    VIRTUAL,
    Divisions,
    Layout,
    Refusals,
    servers_of,
)
from miles_like.planning.nearby import divisors, stage_ends
from miles_like.timing.shape import model_shape
from rollout.config import SGLangFlags
from tests.support.tiny_models import CONFIGS

ROOT = Path(__file__).parents[3]
DEEPSEEK, QWEN = CONFIGS["tiny"], json.loads((ROOT / "configs/qwen3_30b_a3b/config.json").read_text())
DENSE = json.loads((ROOT / "configs/qwen3_32b/config.json").read_text())


def sizes(p: ParallelConfig) -> tuple[int, ...]:
    return (p.tp, p.pp, p.vpp, p.cp, p.ep, p.etp, p.dp)


def accepted(hf: dict[str, object], ranks: int, width: int) -> set[tuple[int, ...]]:
    """Every division that `ParallelConfig` and `check_layout` accept, by trying all of them whole."""
    shape, out = model_shape(hf), set()
    for tp, pp, vpp, cp, ep, etp in itertools.product(
        divisors(width, width),
        divisors(ranks, min(DEEPEST, shape.layers)),
        VIRTUAL,
        CONTEXT,
        divisors(shape.experts or 1, ranks),
        EXPERT_TENSOR,
    ):
        if ranks % (tp * pp * cp) or etp > tp:
            continue
        first, last = stage_ends(shape.layers, pp)
        given = {"tp": tp, "pp": pp, "vpp": vpp, "cp": cp, "ep": ep, "etp": etp, "dp": ranks // (tp * pp * cp)}
        ends = {"first_stage_layers": first, "last_stage_layers": last}
        try:
            p = ParallelConfig.model_validate(given | ends)
            check_layout(p, hf)
        except (ValidationError, ValueError):
            continue
        out.add(sizes(p))
    return out


@pytest.mark.parametrize(("hf", "ranks"), [(DEEPSEEK, 8), (QWEN, 16), (DENSE, 8)], ids=["tiny", "moe", "dense"])
def test_divisions_are_all_that_the_whole_checks_accept(hf: dict[str, object], ranks: int) -> None:
    refusals = Refusals()
    found = [sizes(p) for p in Divisions(hf, model_shape(hf), 8, refusals).of(ranks)]
    assert len(found) == len(set(found)) and set(found) == accepted(hf, ranks, 8)
    assert refusals.sentences.keys() <= {"the model's sizes"}


def test_a_layout_names_its_keys() -> None:
    p = ParallelConfig(tp=2, pp=4, dp=2, ep=4, first_stage_layers=3, last_stage_layers=2)
    change = Layout(p, "full", 1.0).change()
    assert change["parallel.first_stage_layers"] == 3 and change["train.recompute"] == "full"
    assert change["kernels.offload_optimizer"] == 1.0 and change["parallel.vpp"] == 1


def test_servers_use_all_gpus_in_divisions_that_sglang_takes() -> None:
    for hf in (DEEPSEEK, QWEN, DENSE):
        shape = model_shape(hf)
        found = list(servers_of(shape, 32, 8, (0.7, 0.85), 8))
        assert len(found) == len(set(found)) and all(s.count * s.tp == 32 for s in found)
        assert {s.tp for s in found} == {1, 2, 4, 8, 16, 32} and {s.fraction for s in found} == {0.7, 0.85}
        assert all(s.ep in (1, s.tp) and s.dp in (1, s.tp) for s in found)
        assert any(s.ep > 1 for s in found) == shape.is_moe
        assert any(s.dp > 1 for s in found) == (shape.kv_heads == 1)
        assert all(s.ep == s.dp == s.tp > 1 for s in found if s.deepep)
        for s in found:
            keys = {k.removeprefix("rollout.sglang."): v for k, v in s.change().items() if "sglang" in k}
            SGLangFlags.model_validate(keys)
    assert {s.tp for s in servers_of(model_shape(QWEN), 24, 8, (0.7,), 8)} == {1, 2, 4, 8}
