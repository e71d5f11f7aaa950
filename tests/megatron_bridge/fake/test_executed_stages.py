"""Which pipeline stages are alike, and the rank that stands for them.

Not covered: ranks of one stage, which differ by rounding alone where experts do not divide evenly, which no layout
allows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.config import ParallelConfig
from megatron_bridge.fake.stages import (
    distinct_stages,
    first_rank,
    layers_of_stages,
    micro_batches_in_flight,
    stages_of,
)
from tests.megatron_bridge.families.test_published_shapes import LAYOUTS, stages
from tests.support import toy

CONFIGS = Path(__file__).parents[3] / "configs"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_layers_are_those_of_the_published_layouts(name: str) -> None:
    """Worked out here by other code, which is held to the models that megatron builds."""
    layout, layers = ParallelConfig(**LAYOUTS[name]), read(name)["num_hidden_layers"]
    assert [chunk for (chunk,) in layers_of_stages(layout, layers)] == stages(layout, layers)


def test_virtual_stages_take_turns() -> None:
    """The example of megatron's get_transformer_layer_offset: 8 layers, 2 stages, 2 model chunks."""
    found = layers_of_stages(ParallelConfig(pp=2, vpp=2), 8)
    assert [[list(chunk) for chunk in chunks] for chunks in found] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    uneven = layers_of_stages(ParallelConfig(pp=2, vpp=2, first_stage_layers=4, last_stage_layers=2), 6)
    assert [[list(chunk) for chunk in chunks] for chunks in uneven] == [[[0, 1], [3, 4]], [[2], [5]]]


def test_the_earliest_of_each_kind_stands_for_the_others() -> None:
    """Of DeepSeek-V3 over 8 stages three differ: the first has dense layers and the embedding, the last the head."""
    config = toy.config("", tp=8, pp=8, dp=2, ep=16, first_stage_layers=7, last_stage_layers=6)
    found = distinct_stages(config, read("deepseek_v3"))
    assert [stage.number for stage in found] == [0, 1, 7]
    assert [len(stage.layers[0]) for stage in found] == [7, 8, 6]
    assert [sum(stage.layers[0]) for stage in found] == [4, 8, 6]
    assert len(stages_of(config, read("deepseek_v3"))) == 8
    assert first_rank(config.parallel, 4) == 64
    assert [micro_batches_in_flight(config.parallel, stage.number) for stage in found] == [9, 8, 2]
    assert micro_batches_in_flight(ParallelConfig(pp=4, vpp=2), 1) == 8


def test_layers_of_another_kind_make_another_stage() -> None:
    """Every second layer of this model has experts: stages of one layer each are of two kinds, besides the ends."""
    hf = read("qwen3_30b_a3b") | {"num_hidden_layers": 6, "decoder_sparse_step": 2}
    found = distinct_stages(toy.config("", pp=6), hf)
    assert [(stage.number, stage.layers[0]) for stage in found] == [
        (0, (False,)),
        (1, (True,)),
        (2, (False,)),
        (5, (True,)),
    ]
