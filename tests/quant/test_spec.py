"""Which tensors are quantized, and how a spec is completed."""

from __future__ import annotations

from typing import Any

import pytest

from quant.spec import EXPERTS_ONLY, FOUR_BIT, QuantFormat, QuantSpec
from tests.support.refusals import Facts, refuses

FP8 = QuantSpec(format=QuantFormat.FP8)
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


def test_a_block_has_two_positive_sizes() -> None:
    """A size of 0 would divide by zero far from here."""
    with refuses(ValueError, "(128, 0)", "(128, 128)"):
        QuantSpec(format=QuantFormat.FP8, block=(128, 0))


def test_a_format_has_its_own_block_and_convention() -> None:
    """What config.json and the codec need is derived from the format where it is not set."""
    assert QuantSpec(format=QuantFormat.INT4).block == (1, 32)
    assert QuantSpec(format=QuantFormat.NVFP4).convention == "compressed-tensors"
    assert QuantSpec(format=QuantFormat.MXFP8).convention == "sglang"
    assert QuantSpec(format=QuantFormat.MXFP8) == QuantSpec(
        format=QuantFormat.MXFP8, block=(1, 32), convention="sglang"
    )


@pytest.mark.parametrize(
    ("format", "rest", "facts"),
    [
        (QuantFormat.MXFP4, {"block": (1, 16)}, (32, "(1, 16)")),
        (QuantFormat.NVFP4, {"block": (1, 32)}, (16, "nvfp4", "(1, 32)")),
        (QuantFormat.INT4, {"block": (2, 32)}, (8, "INT4")),
        (QuantFormat.INT4, {"block": (1, 12)}, (8, "INT4")),
        (QuantFormat.INT4, {"convention": "modelopt"}, ("modelopt",)),
        (QuantFormat.NVFP4, {"convention": "sglang"}, ("nvfp4", "sglang")),
    ],
)
def test_what_a_format_has_not_is_refused(format: QuantFormat, rest: dict[str, Any], facts: Facts) -> None:
    """A codec of another group would store what no loader reads."""
    with refuses(ValueError, *facts):
        QuantSpec(format=format, **rest)


def test_usual_scope() -> None:
    """Four bits are for routed experts, eight for every linear, unless a scope is given."""
    attention, expert = QUANTIZED[0], "model.layers.3.mlp.experts.255.down_proj.weight"
    for format in QuantFormat:
        if format is not QuantFormat.BF16:
            spec = QuantSpec.of(format)
            assert spec.covers(expert, (64, 64))
            assert spec.covers(attention, (64, 64)) is (format not in FOUR_BIT)
            assert QuantSpec.of(format, "all").covers(attention, (64, 64))
            assert not QuantSpec.of(format, "experts").covers(attention, (64, 64))
            assert spec.ignores(attention) is (format in FOUR_BIT) and not spec.ignores("lm_head.weight")


@pytest.mark.parametrize(
    ("pattern", "name", "kept"),
    [
        (r"re:.*self_attn.*", "model.layers.0.self_attn.q_proj.weight", True),
        (r"re:self_attn", "model.layers.0.self_attn.q_proj.weight", False),  # a name begins with the expression
        (r"re:model\.layers\.1\.", "model.layers.1.self_attn.q_proj.weight", True),
        ("glob:*.self_attn.*", "model.layers.0.self_attn.q_proj.weight", True),
        ("glob:self_attn.*", "model.layers.0.self_attn.q_proj.weight", False),
        ("layers.*.q_proj", "model.layers.0.self_attn.q_proj.weight", False),  # a wildcard stays in its component
    ],
)
def test_other_peoples_patterns(pattern: str, name: str, kept: bool) -> None:
    """Each language by its own rule: matched from the start, or the whole name."""
    assert QuantSpec(format=QuantFormat.FP8, ignore=(pattern,)).covers(name, (64, 64)) is not kept
