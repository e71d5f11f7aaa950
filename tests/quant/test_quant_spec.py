"""Which tensors are quantized, and the form of that in config.json."""

from __future__ import annotations

import pytest

from quant.spec import EXPERTS_ONLY, QuantFormat, QuantSpec

FP8 = QuantSpec(format=QuantFormat.FP8)
DEEPSEEK_V3 = {
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
}
QUANTIZED = [
    "model.layers.0.self_attn.q_a_proj.weight",
    "model.layers.0.self_attn.q_b_proj.weight",
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.0.self_attn.kv_b_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.0.mlp.gate_proj.weight",
    "model.layers.3.mlp.shared_experts.up_proj.weight",
    "model.layers.3.mlp.experts.255.down_proj.weight",
    "model.layers.61.mlp.experts.0.gate_proj.weight",  # of the multi-token prediction layer
    "model.layers.3.headroom.self_attn.q_proj.weight",  # "head" within a component
]
PLAIN = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.norm.weight",
    "model.layers.0.self_attn.q_a_layernorm.weight",
    "model.layers.0.self_attn.kv_a_layernorm.weight",
    "model.layers.3.mlp.gate.weight",
    "model.layers.3.mlp.gate.e_score_correction_bias",
    "model.layers.0.self_attn.q_proj.bias",
    "model.layers.61.eh_proj.weight",
    "model.layers.61.shared_head.head.weight",
    "model.layers.61.enorm.weight",
    "vision_tower.layers.0.mlp.gate_proj.weight",
    "model.layers.3.mixer.gate_proj.weight",
    "model.layers.3.experts.gate_proj.weight",  # no expert number
]


@pytest.mark.parametrize("name", QUANTIZED)
def test_linear_layers_are_quantized(name: str) -> None:
    """Those that DeepSeek-V3's FP8 checkpoint stores so. Not covered: linear and sparse attention."""
    assert FP8.covers(name, (64, 64))


@pytest.mark.parametrize("name", PLAIN)
def test_other_tensors_are_not(name: str) -> None:
    """Those it keeps: an engine creates these parameters in bf16 and would misread FP8 codes."""
    assert not FP8.covers(name, (64, 64))


def test_only_matrices_are_quantized() -> None:
    """A block is two-dimensional; a vector under a covered name must stay as it is."""
    assert not FP8.covers(QUANTIZED[0], (64,))
    assert not FP8.covers(QUANTIZED[0], (2, 64, 64))


def test_bf16_covers_nothing() -> None:
    """A bf16 spec must be a no-op, so that callers need no special case."""
    assert not QuantSpec(format=QuantFormat.BF16).covers(QUANTIZED[0], (64, 64))


@pytest.mark.parametrize(
    ("pattern", "name", "kept"),
    [
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj.weight", True),
        ("layers.0.self_attn", "model.layers.0.self_attn.q_proj.weight", True),
        ("layers.*.self_attn", "model.layers.7.self_attn.q_proj.weight", True),
        ("model.layers.1", "model.layers.11.self_attn.q_proj.weight", False),
        ("mlp.gate", "model.layers.0.mlp.gate_proj.weight", False),
    ],
)
def test_ignore_matches_whole_components(pattern: str, name: str, kept: bool) -> None:
    """`mlp.gate` names the router; as a substring it would also keep every gate projection out."""
    spec = QuantSpec(format=QuantFormat.FP8, ignore=(pattern,))
    assert spec.covers(name, (64, 64)) is not kept


def test_experts_only_leaves_the_routed_experts() -> None:
    """The ignore list of `precision.scope = "experts"` must keep out every covered tensor but those."""
    spec = QuantSpec(format=QuantFormat.FP8, ignore=EXPERTS_ONLY)
    left = [n for n in QUANTIZED if spec.covers(n, (64, 64))]
    assert left == [n for n in QUANTIZED if ".mlp.experts." in n]


def test_deepseeks_config_is_read_and_written() -> None:
    """What is read must be written unchanged, or a converted checkpoint would not load where the first did."""
    spec = QuantSpec.from_hf(DEEPSEEK_V3)
    assert spec == FP8
    assert spec is not None and spec.to_hf() == DEEPSEEK_V3["quantization_config"]
    kept = QuantSpec(format=QuantFormat.FP8, block=(64, 32), ignore=("lm_head", "model.layers.0.mlp"))
    assert QuantSpec.from_hf({"quantization_config": kept.to_hf()}) == kept


def test_a_model_that_is_not_quantized_has_no_spec() -> None:
    """bf16 checkpoints lack the key, or have it as null."""
    assert QuantSpec.from_hf({}) is None
    assert QuantSpec.from_hf({"quantization_config": None}) is None
    with pytest.raises(ValueError, match="bf16"):
        QuantSpec(format=QuantFormat.BF16).to_hf()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quant_method", "awq"),
        ("quant_method", None),
        ("fmt", "e5m2"),
        ("activation_scheme", "static"),
        ("scale_fmt", "ue8m0"),
        ("weight_block_size", None),
        ("weight_block_size", [128]),
    ],
)
def test_what_is_not_supported_is_refused_by_name(key: str, value: object) -> None:
    """Read with the wrong rule, codes become wrong weights and nothing else would fail."""
    with pytest.raises(ValueError, match=key):
        QuantSpec.from_hf({"quantization_config": {**DEEPSEEK_V3["quantization_config"], key: value}})


def test_a_block_has_two_positive_sizes() -> None:
    """A size of 0 would divide by zero far from here."""
    with pytest.raises(ValueError, match="block"):
        QuantSpec(format=QuantFormat.FP8, block=(128, 0))
