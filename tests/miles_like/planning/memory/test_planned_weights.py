"""Elements that ranks hold, against sizes that models' authors publish and against the family's table."""

from __future__ import annotations

import pytest

from megatron_bridge.config import ParallelConfig
from miles_like.planning.memory.weights import ModelWeights, chunk_layers
from tests.support.plans import trainer_ranks

# parameters in billions: model cards on huggingface.co; DeepSeek-V3: arXiv:2412.19437; Kimi K2 (1.04 T): 2507.20534
PUBLISHED = {
    "deepseek_v3_fp8": 671.0,
    "kimi_k2_int4_qat": 1040.0,
    "qwen3_235b_a22b": 235.0,
    "glm45_air": 106.0,
    "qwen3_30b_a3b": 30.5,
    "moonlight_16b_a3b": 16.0,
    "qwen3_4b": 4.0,
    "qwen3_0_6b": 0.6,
}
WHOLE = {"tp": 1, "pp": 1, "dp": 1, "ep": 1, "first_stage_layers": None, "last_stage_layers": None}


def _weights(name: str) -> ModelWeights:
    return trainer_ranks(name).weights


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_of_one_rank_are_those_of_the_model(name: str) -> None:
    [stage] = _weights(name).stages(ParallelConfig(**WHOLE))
    assert stage.elements() / 1e9 == pytest.approx(PUBLISHED[name], rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_ranks_together_hold_every_parameter(name: str) -> None:
    """Experts once; of the others each tensor-parallel rank holds its share of the sharded ones and all the rest."""
    weights = _weights(name)
    [whole] = weights.stages(ParallelConfig(**WHOLE))
    dense, stages = {}, trainer_ranks(name).config.parallel.pp
    for tp in (1, 2, 4):
        layout = ParallelConfig.model_validate({**trainer_ranks(name).config.parallel.model_dump(), "tp": tp, "dp": 32})
        parts = weights.stages(layout)
        assert len(parts) == stages
        assert sum(part.elements("expert") for part in parts) * layout.ep * layout.etp == whole.elements("expert")
        dense[tp] = sum(part.elements("dense") for part in parts)
    sharded = 2 * (dense[1] - dense[2])
    assert sharded == 4 * (dense[2] - dense[4]) > 0
    repeated = dense[1] - whole.elements("dense")  # an embedding at both ends
    assert repeated in (0, weights.dims["vocab"] * weights.dims["hidden"])
    assert bool(repeated) == (stages > 1 and bool(weights.dims.get("tied") or weights.tensors.draft_layers))


def test_every_layer_is_on_one_stage() -> None:
    for layout, layers in (
        (ParallelConfig(pp=8, first_stage_layers=7, last_stage_layers=6), 61),
        (ParallelConfig(pp=4, vpp=2), 48),
        (ParallelConfig(), 28),
    ):
        found = [layer for s in range(layout.pp) for chunk in chunk_layers(layout, layers, s) for layer in chunk]
        assert sorted(found) == list(range(layers))
    assert chunk_layers(ParallelConfig(pp=4, vpp=2), 48, 1) == (tuple(range(6, 12)), tuple(range(30, 36)))


def test_rounded_copies_are_those_of_the_rollouts_format() -> None:
    """DeepSeek's FP8 has attention and experts, INT4 the experts alone; BF16 nothing."""
    copies = {
        name: sum(h.total for h in trainer_ranks(name).stages[-1].held if h.rounded)
        for name in ("qwen3_30b_a3b", "qwen3_30b_a3b_fp8", "qwen3_30b_a3b_int4_qat")
    }
    stage = trainer_ranks("qwen3_30b_a3b").stages[0]
    assert copies["qwen3_30b_a3b"] == 0
    assert copies["qwen3_30b_a3b_int4_qat"] == stage.elements("expert") < copies["qwen3_30b_a3b_fp8"] < stage.elements()
