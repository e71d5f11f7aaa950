"""One layer's pass against published kernels, FLOPs counted otherwise, and laws.

Not covered: kernels that overlap, except where a formula says so.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bridge.config import ParallelConfig
from miles_like.device_table import device
from miles_like.timing.layers import LayerSetup, Recompute, dispatch, layer_time
from miles_like.timing.rates.calibration import HOST_DENSE_LAYER, HOST_MOE_LAYER
from miles_like.timing.rates.roofline import product_rate
from miles_like.timing.shape import ModelShape, model_shape

ROOT = Path(__file__).parents[3]
V3 = model_shape(json.loads((ROOT / "configs/deepseek_v3/config.json").read_text()))
SMALL = model_shape(json.loads((ROOT / "configs/qwen3_30b_a3b/config.json").read_text()))
DENSE = model_shape(json.loads((ROOT / "configs/qwen3_32b/config.json").read_text()))
H100 = device("H100")


def setup(*, recompute: Recompute = "none", **layout: int) -> LayerSetup:
    p = ParallelConfig.model_validate({"dp": 128} | layout)
    return LayerSetup(device=H100, parallel=p, recompute=recompute, imbalance=1.0)


def total(terms: object) -> float:
    assert isinstance(terms, dict)
    return sum(terms.values())


@pytest.mark.parametrize(("ep", "gb_s"), [(32, 57), (64, 50)])
def test_a_combination_takes_what_deepep_measured(ep: int, gb_s: int) -> None:
    """DeepEP's normal kernels, docs/legacy.md: 4,096 tokens of 7,168 channels in BF16, 8 experts of 4 groups. Its
    bandwidth counts the copies to a token's own node too: of d nodes a token's experts are on 4 at most, and it is sent
    to those."""
    nodes = ep // 8
    reached = min(4.0, nodes * (1 - (1 - 1 / nodes) ** 8))
    seen = 4096 * 7168 * 2 * reached / (gb_s * 1e9)
    flex = replace(setup(ep=ep), dispatcher="flex")
    assert dispatch(V3, flex, 4096) == pytest.approx(seen, rel=0.35)


def test_an_all_to_all_sends_a_token_once_for_each_of_its_experts() -> None:
    """8 ranks in one node: 7/8 of 8 copies of a token's row leave the rank."""
    seen = dispatch(SMALL, setup(ep=8), 1000) - dispatch(SMALL, setup(ep=8), 0)
    assert seen == pytest.approx(1000 * 8 * 2 * SMALL.hidden * 7 / 8 / (0.8 * H100.intra))


def test_deepep_sends_less_than_an_all_to_all_between_nodes() -> None:
    plain, flex = setup(ep=32), replace(setup(ep=32), dispatcher="flex")
    assert dispatch(V3, flex, 4096) < dispatch(V3, plain, 4096)
    assert dispatch(V3, setup(ep=1), 4096) == 0.0
    assert dispatch(V3, replace(plain, dispatcher="allgather"), 4096) > 0


def flops_of(shape: ModelShape, tokens: float, squares: float, *, moe: bool) -> float:
    """Of one forward of a layer, from its elements."""
    active = shape.attention + (shape.top_k * shape.expert + shape.shared + shape.router if moe else shape.dense)
    return 2 * tokens * active + squares * shape.core


@pytest.mark.parametrize(("shape", "moe"), [(V3, True), (V3, False), (SMALL, True), (DENSE, False)])
def test_a_layer_takes_longer_than_its_flops_at_the_product_rate(shape: ModelShape, moe: bool) -> None:
    for tokens, sample in ((4096.0, 4096.0), (65536.0, 8192.0)):
        squares = tokens / sample * sample**2
        found = layer_time(shape, setup(), tokens, squares, moe=moe)
        floor = flops_of(shape, tokens, squares, moe=moe) / product_rate(H100, fp8=False)
        assert floor < total(found.forward) and 2 * floor < total(found.backward)
        host = HOST_MOE_LAYER if moe else HOST_DENSE_LAYER
        assert total(found.forward) < max(host * 1.0001, 3.5 * floor)


def test_full_recomputation_adds_a_forward_to_backward() -> None:
    plain = layer_time(V3, setup(), 16384, 16384.0 * 8192, moe=True)
    full = layer_time(V3, setup(recompute="full"), 16384, 16384.0 * 8192, moe=True)
    assert full.forward == plain.forward
    assert total(full.backward) == pytest.approx(total(plain.backward) + total(plain.forward))


def test_selective_recomputation_adds_the_named_modules() -> None:
    tokens, squares = 65536.0, 65536.0 * 8192
    plain = layer_time(V3, setup(), tokens, squares, moe=True)
    core = layer_time(
        V3, replace(setup(recompute="selective"), again=frozenset({"core_attn"})), tokens, squares, moe=True
    )
    moe = layer_time(V3, replace(setup(recompute="selective"), again=frozenset({"moe"})), tokens, squares, moe=True)
    full = layer_time(V3, setup(recompute="full"), tokens, squares, moe=True)
    added = {name: total(x.backward) - total(plain.backward) for name, x in (("core", core), ("moe", moe))}
    assert added["core"] == pytest.approx(plain.forward["attention"])
    assert 0 < added["core"] < added["moe"] < total(full.backward) - total(plain.backward)


def test_adapters_skip_the_products_of_weights_gradients() -> None:
    plain = layer_time(V3, setup(), 65536, 65536.0 * 8192, moe=True)
    adapted = layer_time(V3, replace(setup(), adapters=True), 65536, 65536.0 * 8192, moe=True)
    assert adapted.backward["products"] == pytest.approx(plain.backward["products"] / 2)


def test_ranks_divide_a_layer_s_work() -> None:
    """With long packs tensor and context parallelism divide products and attention; both add communication."""
    tokens, squares = 131072.0, 131072.0 * 16384
    one = layer_time(V3, setup(), tokens, squares, moe=True).forward
    for layout, term in (({"tp": 8, "dp": 16}, "tensor-parallel collectives"), ({"cp": 8, "dp": 16}, "")):
        many = layer_time(V3, setup(**layout), tokens, squares, moe=True).forward
        assert many["attention"] == pytest.approx(one["attention"] / 8)
        assert one["products"] / 8 <= many["products"] < one["products"] / 6
        assert not term or many[term] > 0
    spread = layer_time(V3, setup(ep=32), tokens, squares, moe=True).forward
    assert spread["all-to-all"] > 0 and "all-to-all" not in one


def test_an_uneven_load_of_experts_is_waited_for() -> None:
    even = layer_time(V3, setup(ep=32), 65536, 65536.0 * 8192, moe=True).forward
    uneven = layer_time(V3, replace(setup(ep=32), imbalance=2.0), 65536, 65536.0 * 8192, moe=True).forward
    assert uneven["all-to-all"] == pytest.approx(2 * even["all-to-all"])
    assert 1.3 * even["products"] < uneven["products"] < 2 * even["products"]


def test_short_micro_batches_wait_for_the_host() -> None:
    found = layer_time(SMALL, setup(ep=8), 64, 64.0 * 64, moe=True)
    assert total(found.forward) == pytest.approx(HOST_MOE_LAYER) and found.forward["host"] > 0.9 * HOST_MOE_LAYER
    again = layer_time(SMALL, setup(ep=8, recompute="full"), 64, 64.0 * 64, moe=True)
    assert total(again.backward) == pytest.approx(2 * HOST_MOE_LAYER)


def test_fp8_halves_what_products_take() -> None:
    plain = layer_time(V3, setup(), 65536, 65536.0 * 8192, moe=True).forward
    fp8 = layer_time(V3, replace(setup(), fp8=True), 65536, 65536.0 * 8192, moe=True).forward
    assert fp8["products"] == pytest.approx(plain["products"] / 2, rel=0.02) and fp8["attention"] == plain["attention"]
