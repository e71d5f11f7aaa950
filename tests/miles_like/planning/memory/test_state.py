"""Parameters, gradients and optimizer state of a rank, against published formulas and against ranks that were built."""

from __future__ import annotations

import pytest

from miles_like.planning.memory.parts import GIB, total
from miles_like.planning.memory.state import data_ranks, rank_state
from tests.support.plans import gib_of, tensors, trainer_ranks

OLD = ("kernels.offload_optimizer=0.0",)  # of DeepSeek-V3 on 16 nodes
# GiB of ranks built by the trainer's code at true shapes: parameters and gradients, masters, moments, rounded copies
BUILT = {4: (33.5, 21.7, 43.3, 11.1)}
# GiB by stage: all of these, and the peak of a step
MEASURED = {0: (59.4, 65.1), 4: (109.6, 113.7), 7: (83.5, 86.4)}


@pytest.mark.parametrize("stage", BUILT)
def test_each_part_is_that_of_the_rank_that_was_built(stage: int) -> None:
    state = trainer_ranks("deepseek_v3_fp8", *OLD).states[stage].device
    moved = state["parameters"] + state["gradients"]
    found = [moved, state["masters"], state["moments"], state["rounded weights"]]
    assert [n / GIB for n in found] == pytest.approx(BUILT[stage], abs=0.1)


@pytest.mark.parametrize("stage", MEASURED)
def test_sums_and_peaks_are_those_of_the_ranks_that_were_built(stage: int) -> None:
    plans, (static, peak) = trainer_ranks("deepseek_v3_fp8", *OLD), MEASURED[stage]
    assert total(plans.states[stage].device) / GIB == pytest.approx(static, rel=0.01)
    assert gib_of(plans, stage) == pytest.approx(peak, rel=0.05)


def test_a_rank_of_qwen3_30b_in_fp8() -> None:
    assert total(trainer_ranks("qwen3_30b_a3b_fp8").states[0].device) / GIB == pytest.approx(51.0, rel=0.01)


@pytest.mark.parametrize("dp", [1, 2, 8])
def test_bytes_of_a_parameter_are_megatrons(dp: int) -> None:
    """18, and 6 + 12 / dp with a distributed optimizer: theoretical_memory_usage.py of Megatron-LM."""
    plans = trainer_ranks(
        "qwen3_4b", "parallel.tp=1", f"parallel.dp={dp}", f"cluster.gpus_per_node={dp}", f"rollout.servers={dp}"
    )
    stage, config = plans.stages[0], plans.config
    for distributed, expected in ((True, 6 + 12 / dp), (False, 18.0)):
        other = config.model_copy(update={"distributed_optimizer": distributed})
        nbytes = total(rank_state(stage, other).device)
        assert nbytes / stage.elements() == pytest.approx(expected, rel=1e-3)


def test_experts_are_sharded_over_the_ranks_that_repeat_them() -> None:
    """DeepSeek-V3's 128 ranks hold each expert once: its optimizer state is whole on every rank."""
    layout = trainer_ranks("deepseek_v3_fp8").config.parallel
    assert (data_ranks(layout, "dense"), data_ranks(layout, "expert")) == (2, 1)
    wider = layout.model_copy(update={"dp": 4})
    assert (data_ranks(wider, "dense"), data_ranks(wider, "expert")) == (4, 2)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_an_offloaded_share_is_on_the_host(share: float) -> None:
    """Masters, moments and gradients on their way: 4, 8 and 4 bytes of each parameter that this rank updates."""
    plans = trainer_ranks("qwen3_30b_a3b", f"kernels.offload_optimizer={share}")
    whole = trainer_ranks("qwen3_30b_a3b", "kernels.offload_optimizer=0.0").states[0].device
    state = plans.states[0]
    kept = state.device.get("moments", 0)
    assert kept + state.host.moments == pytest.approx(whole["moments"], rel=1e-3)  # a rank's shards, or the mean rank's
    assert (state.host.masters, state.host.gradients) == (state.host.moments // 2, state.host.moments // 2)
    assert 2 * state.device.get("masters", 0) == kept
    # at least the share, in whole parameters
    largest = 8 * max(h.elements for h in plans.stages[0].held)
    assert (1 - share) * whole["moments"] - 2 * largest <= kept <= (1 - share) * whole["moments"] * 1.001
    others = {part: n for part, n in state.device.items() if part not in ("masters", "moments")}
    assert others == {part: n for part, n in whole.items() if part not in ("masters", "moments")}


def test_ranks_with_the_same_parameters_share_them_out() -> None:
    """Every parameter of a stage is in exactly one rank's shards. The plan has the most that a rank keeps on its device
    and the mean on the host."""
    plans = trainer_ranks("qwen3_30b_a3b_fp8_node")
    stage, config, planned = plans.stages[0], plans.config, rank_state(plans.stages[0], plans.config)
    ranks = range(data_ranks(config.parallel, "dense"))
    states = [rank_state(stage, config, rank) for rank in ranks]
    assert config.kernels.offload_optimizer == 0.25 and data_ranks(config.parallel, "expert") in (1, *ranks)
    moments = sum(s.device["moments"] + s.host.moments for s in states)
    copies = len(ranks) // data_ranks(config.parallel, "expert")  # of one rank's experts in this sum
    assert moments == pytest.approx(8 * (stage.elements("dense") + copies * stage.elements("expert")), rel=1e-5)
    assert planned.device["moments"] >= max(s.device["moments"] for s in states)
    assert planned.host.moments == pytest.approx(sum(s.host.moments for s in states) / len(ranks), rel=1e-5)


def test_a_sleeping_rank_keeps_neither_weights_nor_state() -> None:
    plans = trainer_ranks("deepseek_v3_fp8")
    asleep = tensors(plans, 4)["asleep"]
    assert set(asleep) <= {"activations", "communication"} and total(asleep) < GIB
    awake = tensors(trainer_ranks("deepseek_v3_fp8", "cluster.colocate=false", "cluster.nodes=32"), 4)
    assert "asleep" not in awake and total(awake["publishing"]) > total(plans.states[4].device)
