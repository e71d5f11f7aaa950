"""Executed FLOPs against the model's, and against records of executed ranks.

Not covered: multi-token prediction.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.plan.flops import forward_terms
from miles_like.timing.devices import device
from miles_like.timing.flops import executed_flops
from miles_like.timing.layers import LayerSetup
from miles_like.timing.shape import model_shape

ROOT = Path(__file__).parents[3]
NAMES = ("deepseek_v3", "qwen3_30b_a3b", "qwen3_32b", "glm45")
HF = {name: json.loads((ROOT / f"configs/{name}/config.json").read_text()) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_without_recomputation_executes_the_model_s_flops(name: str) -> None:
    """Three forwards of every product, and the head's logits once more; attention's backward is 2.5 forwards."""
    terms = forward_terms(HF[name], [100, 37], head_rows=60)
    core, head = terms.pop("core"), terms["head"]
    setup = LayerSetup(device=device("H100"), parallel=ParallelConfig())
    pairs = (100 * 101 + 37 * 38) / 2
    found = executed_flops(model_shape(HF[name]), setup, 0, tokens=137, pairs=pairs, loss_rows=60)
    assert found["linears"] == pytest.approx(3 * sum(terms.values()) + head)
    assert found["core attention"] == pytest.approx(3.5 * core)
    full = executed_flops(
        model_shape(HF[name]), replace(setup, recompute="full"), 0, tokens=137, pairs=pairs, loss_rows=60
    )
    assert full["linears"] == pytest.approx(4 * sum(terms.values()))
    assert full["core attention"] == pytest.approx(4.5 * core)


@pytest.mark.parametrize("layout", [{"tp": 8, "pp": 8, "dp": 2, "ep": 16}, {"tp": 2, "cp": 4, "pp": 8, "dp": 2}])
def test_the_ranks_of_a_replica_execute_the_model_s_flops_together(layout: dict[str, int]) -> None:
    shape = model_shape(HF["deepseek_v3"])
    p = ParallelConfig.model_validate(layout | {"first_stage_layers": 7, "last_stage_layers": 6})
    setup = LayerSetup(device=device("H100"), parallel=p, imbalance=1.0)
    ranks = p.tp * p.cp
    found = [executed_flops(shape, setup, s, tokens=4096, pairs=4096 * 4097 / 2, loss_rows=4096) for s in range(p.pp)]
    terms = forward_terms(HF["deepseek_v3"], [4096])
    core = terms.pop("core")
    assert ranks * sum(x["linears"] for x in found) == pytest.approx(3 * sum(terms.values()) + terms["head"])
    assert ranks * sum(x["core attention"] for x in found) == pytest.approx(3.5 * core)


def test_a_middle_stage_of_deepseek_v3_executes_what_was_counted() -> None:
    """76.7 T of products for 16,384 tokens on rank 64 of 128: counted by torch over the trainer's own code on fake
    tensors, with full recomputation."""
    p = ParallelConfig(tp=8, pp=8, dp=2, ep=16, first_stage_layers=7, last_stage_layers=6)
    setup = LayerSetup(device=device("H100"), parallel=p, recompute="full", imbalance=1.0)
    shape = model_shape(HF["deepseek_v3"])
    found = executed_flops(shape, setup, 4, tokens=16384, pairs=0.0, loss_rows=16384)
    assert found["linears"] == pytest.approx(76.7e12, rel=0.005)


def test_selective_recomputation_and_adapters_change_what_they_name() -> None:
    shape = model_shape(HF["deepseek_v3"])
    plain = LayerSetup(device=device("H100"), parallel=ParallelConfig(), imbalance=1.0)

    def flops(setup: LayerSetup) -> dict[str, float]:
        return executed_flops(shape, setup, 0, tokens=1024, pairs=1024 * 1025 / 2, loss_rows=0)

    core = flops(replace(plain, recompute="selective", again=frozenset({"core_attn"})))
    assert core["linears"] == flops(plain)["linears"]
    assert core["core attention"] == pytest.approx(flops(plain)["core attention"] * 4.5 / 3.5)
    moe = flops(replace(plain, recompute="selective", again=frozenset({"moe"})))
    added = 2 * 1024 * shape.sparse * (shape.top_k * shape.expert + shape.shared + shape.router)
    assert moe["linears"] - flops(plain)["linears"] == pytest.approx(added)
    assert flops(replace(plain, adapters=True))["linears"] == pytest.approx(flops(plain)["linears"] * 2 / 3)
