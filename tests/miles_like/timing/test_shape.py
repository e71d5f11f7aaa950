"""A model's counts against the family tables, the FLOP formula that torch's counter confirms, and published figures.

Not covered: norms and biases, which are not counted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.flops import forward_terms
from miles_like.timing.shape import model_shape
from tests.support.tiny_models import CONFIGS as TINY

ROOT = Path(__file__).parents[3]
SHIPPED = {p.parent.name: json.loads(p.read_text()) for p in sorted((ROOT / "configs").glob("*/config.json"))}
CONFIGS: dict[str, dict[str, Any]] = {n: hf for n, hf in SHIPPED.items() if n != "tiny"} | dict(TINY)


@pytest.mark.parametrize("name", CONFIGS)
def test_elements_are_those_of_the_family_s_table(name: str) -> None:
    """All but vectors: norms, biases, routing biases."""
    hf = CONFIGS[name]
    table = family_of(hf).bind(hf)
    places = table.kinds()
    matrices = sum(count * place.shape[0] * place.shape[1] for place, count in places if len(place.shape) == 2)
    assert model_shape(hf).parameters == matrices


@pytest.mark.parametrize("name", CONFIGS)
def test_active_elements_and_core_are_the_flops_of_a_forward(name: str) -> None:
    hf, shape = CONFIGS[name], model_shape(CONFIGS[name])
    terms = forward_terms(hf, [7, 30])
    core = terms.pop("core")
    assert 2 * shape.active * 37 == pytest.approx(sum(terms.values()))
    assert shape.layers * shape.core * (7 * 8 + 30 * 31) == pytest.approx(core)


def test_deepseek_v3_has_its_published_sizes() -> None:
    shape = model_shape(SHIPPED["deepseek_v3"])
    assert shape.parameters == pytest.approx(671e9, rel=0.001)  # arXiv:2412.19437, section 1
    # 37 B with the embedding, of which a token looks up one row
    assert shape.active + shape.hidden * shape.vocab == pytest.approx(37e9, rel=0.02)
    assert 2 * shape.cached * shape.layers == 70_272  # bytes of cache a token: arXiv:2505.09343, table 1
    assert 0 < shape.latent + shape.up < shape.attention


def test_qwen3_moe_has_its_published_sizes() -> None:
    small, large = model_shape(SHIPPED["qwen3_30b_a3b"]), model_shape(SHIPPED["qwen3_235b_a22b"])
    assert small.parameters == pytest.approx(30.5e9, rel=0.002)  # model card
    assert large.parameters == pytest.approx(235e9, rel=0.002)
    assert small.active + small.hidden * small.vocab == pytest.approx(3.3e9, rel=0.02)
    assert large.active + large.hidden * large.vocab == pytest.approx(22e9, rel=0.02)
    assert small.latent == small.up == 0 and small.kv_heads == 4


def test_grouped_queries_divide_the_cache_and_mla_does_not() -> None:
    for hf in CONFIGS.values():
        shape = model_shape(hf)
        assert shape.is_moe == bool(shape.experts) and shape.sparse <= shape.layers
        assert shape.kv_heads == (1 if "kv_lora_rank" in hf else hf["num_key_value_heads"])
