"""Activations by schedule and by recomputation, against megatron's schedules and published formulas."""

from __future__ import annotations

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.device.device import init_device
from miles_like.planning.memory.activations import StepShape, chunks_in_flight
from miles_like.planning.memory.parts import MIB
from tests.support.plans import trainer_ranks

STEP = StepShape(tokens=8192, micro_batches=32, longest=8192)


def test_micro_batches_in_flight_are_those_of_1f1b() -> None:
    """At most as many as stages remain (arXiv:2104.04473, section 2.2), and no more than there are."""
    layout = ParallelConfig(pp=8)
    assert [chunks_in_flight(layout, stage, 32) for stage in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [chunks_in_flight(layout, stage, 3) for stage in range(8)] == [3, 3, 3, 3, 3, 3, 2, 1]


@pytest.mark.slow
@pytest.mark.parametrize("vpp", [1, 2, 4])
def test_warm_up_passes_are_megatrons(vpp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    init_device()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    layout = ParallelConfig(pp=4, vpp=vpp)
    state = {"world_size": layout.pp, "rank": 0}
    for name in state:
        monkeypatch.setattr(parallel_state, f"get_pipeline_model_parallel_{name}", lambda name=name: state[name])
    virtual = "get_virtual_pipeline_model_parallel_world_size"
    monkeypatch.setattr(parallel_state, virtual, lambda: vpp if vpp > 1 else None)
    for micro_batches in (4, 8, 32):
        for state["rank"] in range(layout.pp):
            _, _, warmup, remaining = get_pp_rank_microbatches(micro_batches, vpp, layout.pp)
            found = chunks_in_flight(layout, state["rank"], micro_batches)
            assert found == warmup + (1 if remaining else 0)


def _activations(*overrides: str, name: str = "qwen3_4b", stage: int = 0, step: StepShape = STEP) -> int:
    plans = trainer_ranks(name, *overrides, step=step)
    return plans.passes.peak(plans.stages[stage]).activations


def test_recomputation_keeps_the_input_of_each_layer() -> None:
    """2 s b h a layer (arXiv:2205.05198, section 5): with sequence parallelism divided by its ranks."""
    for tp in (1, 2):
        plans = trainer_ranks("qwen3_4b", f"parallel.tp={tp}", f"parallel.dp={8 // tp}", step=STEP)
        assert plans.passes.costs[False].keeps == 2 * 8192 * 2560 // tp
    assert _activations() < _activations('train.recompute="selective"') <= _activations('train.recompute="none"')


def test_a_layer_keeps_what_the_published_formula_counts() -> None:
    """Without recomputation a layer of arXiv:2205.05198, table 2, keeps 34 s b h bytes with flash attention: 24 of them
    over matrices (the MLP's of width 4 h: 16), 10 of norms, inputs and dropout masks. Qwen3 has grouped queries, SwiGLU
    of width f, normed queries and keys, and no dropout: 2 h for each of two norms' inputs and two matrices' inputs,
    queries twice and the rows of their product, outputs of attention twice, and both halves of the MLP with their
    product, all in BF16."""
    hidden, query, key, ffn, tokens = 2560, 4096, 1024, 9728, 8192
    formula = 2 * (4 * hidden + (query + 2 * key) + 2 * query + 2 * query + 3 * ffn) * tokens
    plans = trainer_ranks("qwen3_4b", "parallel.tp=1", "parallel.dp=8", 'train.recompute="none"', step=STEP)
    assert plans.passes.costs[False].whole == pytest.approx(formula, rel=0.06)


def test_every_micro_batch_in_flight_is_held() -> None:
    layouts = ("parallel.pp=4", "parallel.dp=1", "rollout.servers=8")
    hidden = 8192 * 2560 * 2 // 2  # TP2
    layers = 9 + 1  # of a stage, and the input that is received
    few, many = (_activations(*layouts, step=StepShape(tokens=8192, micro_batches=n, longest=8192)) for n in (2, 4))
    assert many - few == pytest.approx(2 * hidden * layers, rel=0.1)
    assert _activations(*layouts, stage=3) < few


def test_the_head_computes_logits_within_their_limit() -> None:
    """Hidden states and a block of logits, not logits of all tokens: 8,192 x 151,936 in FP32 are 4.6 GiB."""
    plans = trainer_ranks("qwen3_4b", step=STEP)
    peak = plans.passes._head_moments(0)[0][1]
    limit = plans.config.logprob_memory_mib * MIB
    weight, states = 151936 // 2 * 2560 * 2, 8192 * 2560 * 2
    assert peak == 4 * states + weight + limit < 8192 * 151936 * 4  # states in BF16 twice and their gradient in FP32


def test_an_uneven_expert_rank_needs_more() -> None:
    even, uneven = (trainer_ranks("qwen3_30b_a3b", step=STEP, imbalance=imbalance) for imbalance in (1.0, 2.0))
    more = uneven.passes.peak(uneven.stages[0]).activations - even.passes.peak(even.stages[0]).activations
    rows = 8192 // 4 * 8  # that a rank's experts get on average
    assert more > rows * (2 * 2048 + 2 * 768 * 2)  # at least a row and both halves of the MLP
