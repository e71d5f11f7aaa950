"""Executed FLOPs against the model's, and against what torch counts while ranks are executed on fake tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.fake.records import ExecutedRank, read_records
from megatron_bridge.fake.substitutes.facts import packed
from megatron_bridge.plan.flops import forward_terms
from miles_like.config.load import load_config
from miles_like.config.ranks import trainer_config
from miles_like.device_table import device
from miles_like.timing.layers import LayerSetup
from miles_like.timing.of_run import NOWHERE, Facts, layer_setup
from miles_like.timing.shape import model_shape
from tests.support.executed_flops import executed_flops
from tests.support.plans import model_of

ROOT = Path(__file__).parents[3]
RECORDS = [r for r in read_records(ROOT / "docs/plan/executed.json") if r["role"] == "trainer"]
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


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: " ".join([r["config"], f"rank {r['rank']}", *r["overrides"]]))
def test_flops_are_those_of_executed_ranks(record: ExecutedRank) -> None:
    """Counted by torch over the trainer's own code on fake tensors: within 5 % of products and of attention."""
    run = load_config(ROOT / f"configs/{record['config']}.toml", record["overrides"])
    assert record["world"] == run.parallel.world_size
    hf = model_of(run).hf
    setup = layer_setup(trainer_config(run, NOWHERE), hf, Facts(device=device("H100"), imbalance=record["imbalance"]))
    pack = packed(record["pack_tokens"], record["sample_tokens"])
    found = executed_flops(
        model_shape(hf), setup, record["stage"], tokens=pack.tokens, pairs=pack.causal_pairs, loss_rows=pack.tokens
    )
    assert found == pytest.approx(record["flops"], rel=0.05)


def test_the_records_have_first_middle_and_last_stages() -> None:
    """Of trainers: a critic's and a reference's rank have other passes."""
    stages = {(r["config"], r["stage"]) for r in RECORDS}
    assert {("deepseek_v3_fp8", 0), ("deepseek_v3_fp8", 1), ("deepseek_v3_fp8", 7)} <= stages
    assert len({r["config"] for r in RECORDS}) >= 3


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
