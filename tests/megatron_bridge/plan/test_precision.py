"""The combinations that quantization-aware training refuses from config.json, and the grid that it trains on."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_bridge.plan.kernels import choose_spec
from megatron_bridge.plan.precision import check_precision, trained_spec
from megatron_bridge.plan.resolve import resolve
from quant.spec import EXPERTS_ONLY, QuantFormat, QuantSpec
from tests.support import toy
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import tiny, tiny_dense, tiny_qwen

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
WIDE = tiny(q_lora_rank=128, kv_lora_rank=128, moe_intermediate_size=128, v_head_dim=64)  # all inputs divide by 128


def _check(hf: dict[str, Any], precision: dict[str, Any], **settings: Any) -> None:
    check_precision(toy.config("", precision={"qat": True, **precision}, **settings), hf)


@pytest.mark.parametrize(
    ("hf", "precision", "settings", "facts"),
    [
        (
            tiny(quantization_config=FP8),
            {"format": "int4"},
            {},
            ("precision.format", "int4", "fp8", "precision.format", "fp8"),
        ),
        (
            tiny(quantization_config=FP8),
            {"format": "fp8", "block": [16, 32]},
            {},
            ("precision.block", "[16, 32]", "[32, 32]"),
        ),
        (
            tiny(quantization_config=FP8),
            {"format": "fp8", "scope": "experts"},
            {},
            ("precision.scope", "experts", "model.layers.0.self_attn.q_a_proj.weight", "precision.scope"),
        ),
        (
            tiny(quantization_config=FP8 | {"modules_to_not_convert": ["model.layers.1.self_attn"]}),
            {"format": "fp8", "scope": "all"},
            {},
            ("model.layers.1.self_attn.q_a_proj.weight",),
        ),
        (
            tiny(),
            {"format": "fp8", "block": [64, 32]},
            {"tp": 4},
            ("model.layers.0.self_attn.q_b_proj.weight", 128, 32, "parallel.tp"),
        ),
        (
            tiny(),
            {"format": "fp8", "block": [16, 64]},
            {"tp": 4},
            ("model.layers.0.self_attn.o_proj.weight", 128, 32, 16, 64),
        ),
        (
            tiny_qwen(),
            {"format": "fp8", "block": [32, 16]},
            {"tp": 2},
            ("model.layers.0.self_attn.k_proj.weight", 96, 48, "parallel.tp"),
        ),
        (
            tiny_qwen(),
            {"format": "int4"},
            {"dp": 4, "etp": 4},
            ("model.layers.0.mlp.experts.0.down_proj.weight", 64, 16, "parallel.etp", 4, 1, 32, "parallel.ep"),
        ),
        (
            tiny_qwen(),
            {"format": "fp8", "block": [64, 32]},
            {"dp": 2, "etp": 2},
            ("model.layers.0.mlp.experts.0.gate_proj.weight", 64, 32),
        ),
        (
            tiny(moe_intermediate_size=72),
            {"format": "int4"},
            {},
            ("model.layers.1.mlp.experts.0.down_proj.weight", 72, 32),
        ),
        (
            tiny(),
            {"format": "nvfp4", "scope": "all"},
            {},
            ("model.layers.0.self_attn.q_a_proj.weight", "experts"),
        ),
        (tiny_dense(), {"format": "int4"}, {}, ("precision.scope",)),
        (
            tiny(),
            {"format": "fp8"},
            {"kernels": {"fp8": "blockwise"}},
            ("kernels.fp8", "blockwise", "kernels.fp8", "none"),
        ),
        (
            tiny(),
            {"format": "fp8", "activations": "fp8"},
            {},
            ("precision.activations", "fp8", "model.layers.0.self_attn.q_b_proj.weight", 64, 128),
        ),
        (
            WIDE,
            {"format": "fp8", "activations": "fp8", "block": [16, 16]},
            {"dp": 2, "etp": 2},
            ("model.layers.1.mlp.experts.0.down_proj.weight", 64, "parallel.etp", 2, "parallel.etp"),
        ),
    ],
)
def test_refusals_give_both_numbers_and_the_remedy(
    hf: dict[str, Any], precision: dict[str, Any], settings: dict[str, Any], facts: Facts
) -> None:
    with refuses(ValueError, *facts):
        _check(hf, precision, **settings)


def test_activations_are_not_rounded_by_transformer_engines_modules() -> None:
    config = toy.config("", precision={"format": "mxfp8", "activations": "fp8"})
    with refuses(ValueError, "kernels.spec", "local"):
        check_precision(config, WIDE, te=True)
    check_precision(toy.config("", precision={"format": "int4", "qat": True}), WIDE, te=True)


def test_a_dry_run_is_refused_too() -> None:
    with refuses(ValueError, 1, 32):
        resolve(toy.config("", precision={"format": "int4", "qat": True}, dp=4, etp=4), tiny_qwen(), cuda=False)


@pytest.mark.parametrize(
    ("hf", "precision", "settings"),
    [
        (tiny(), {"format": "fp8"}, {}),  # blocks of 128 where a dimension is not divided may be cut short
        (tiny(), {"format": "int4"}, {"dp": 2, "ep": 2}),
        (tiny(), {"format": "int4"}, {"tp": 2, "etp": 2}),
        (tiny_qwen(), {"format": "fp8", "block": [16, 16]}, {"tp": 2, "etp": 2}),
        (WIDE, {"format": "fp8", "activations": "fp8"}, {}),
        (tiny(), {"format": "mxfp8", "activations": "fp8"}, {"tp": 2, "etp": 2}),
        # attention, whose rows a block of 64 would cut, is not quantized
        (tiny_qwen(), {"format": "fp8", "block": [64, 32], "scope": "experts"}, {"tp": 2}),
    ],
)
def test_whole_blocks_on_every_rank_pass(
    hf: dict[str, Any], precision: dict[str, Any], settings: dict[str, Any]
) -> None:
    _check(hf, precision, **settings)
    spec = trained_spec(toy.config("", precision={"qat": True, **precision}, **settings), hf)
    assert spec is not None and spec.format == precision["format"]  # and something was there to be checked


def test_the_grid_is_the_checkpoints_own() -> None:
    """Its ignored modules and block too; where it has none, that of the configuration."""
    cfg = toy.config("", precision={"format": "fp8", "qat": True})
    stored = trained_spec(cfg, tiny(quantization_config=FP8 | {"modules_to_not_convert": ["self_attn"]}))
    assert stored == QuantSpec(format=QuantFormat.FP8, block=(32, 32), ignore=("self_attn",))
    assert trained_spec(cfg, tiny()) == QuantSpec(format=QuantFormat.FP8)
    experts = toy.config("", precision={"format": "int4", "qat": True})
    assert trained_spec(experts, tiny()) == QuantSpec(format=QuantFormat.INT4, ignore=EXPERTS_ONLY)


def test_nothing_is_asked_of_a_run_without_it() -> None:
    cfg = toy.config("", precision={"format": "int4", "allow_without_qat": True})
    assert trained_spec(cfg, tiny(quantization_config=FP8)) is None


def test_auto_builds_local_modules_where_inputs_are_rounded() -> None:
    """TransformerEngine's own would compute with unrounded inputs; weights are rounded in either."""
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"format": "mxfp8", "activations": "fp8"}, "local"),
        ({"format": "int4", "qat": True}, "te"),
        ({"format": "bf16"}, "te"),
    )
    for precision, want in cases:
        assert choose_spec(toy.config("", precision=precision), tiny(), cuda=True, te=True) == want


@pytest.mark.parametrize("module", ["model.layers.1.self_attn.q_proj", "model.layers.1.mlp.experts.3.gate_proj"])
def test_inputs_of_a_linear_that_is_quantized_in_part_are_refused(module: str) -> None:
    """The trainer would round them for all of its rows, the engine for the quantized ones."""
    hf = tiny_qwen(hidden_size=128, head_dim=32, quantization_config=FP8 | {"modules_to_not_convert": [module]})
    _check(hf, {"format": "fp8"})
    with refuses(ValueError, f"{module}.weight", "precision.activations", "none"):
        _check(hf | {"moe_intermediate_size": 128}, {"format": "fp8", "activations": "fp8"})
