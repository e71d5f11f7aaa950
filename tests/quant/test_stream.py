"""Streams: what passes, what is encoded, how codes find their scales, what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quant.formats.codec import QuantTensor
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from quant.stream import dequantize_stream, pair_stream, quantize_stream
from tests.support.refusals import Facts, refuses

FP8 = QuantSpec(format=QuantFormat.FP8, block=(4, 8))
SCALE = "model.layers.0.self_attn.q_proj.weight_scale_inv"
Q, EXPERT, NORM, EMBED = (
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.experts.3.up_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "model.embed_tokens.weight",
)


def weights() -> list[tuple[str, Tensor]]:
    g = torch.Generator().manual_seed(0)
    shapes = {EMBED: (10, 16), Q: (12, 16), NORM: (16,), EXPERT: (9, 20)}
    return [(n, torch.randn(s, generator=g).to(torch.bfloat16)) for n, s in shapes.items()]


def codes_and_scales() -> list[tuple[str, Tensor]]:
    return list(quantize_stream(weights(), FP8))


def test_names_and_order() -> None:
    """A scale follows its codes directly, so that both travel in the same update; the rest keeps its place."""
    assert [n for n, _ in codes_and_scales()] == [EMBED, Q, SCALE, NORM, EXPERT, EXPERT + "_scale_inv"]
    kinds = {n: t.dtype for n, t in codes_and_scales()}
    assert kinds[Q] is torch.float8_e4m3fn and kinds[SCALE] is torch.float32
    assert kinds[EMBED] is torch.bfloat16


@pytest.mark.parametrize("spec", [None, QuantSpec(format=QuantFormat.BF16)])
def test_without_a_format_everything_passes(spec: QuantSpec | None) -> None:
    """The same objects, not copies."""
    given = weights()
    assert all(a is b for (_, a), (_, b) in zip(given, quantize_stream(given, spec), strict=True))
    assert all(a is b for (_, a), (_, b) in zip(given, pair_stream(given, spec), strict=True))


@pytest.mark.parametrize("batch_bytes", [1, 400, 1 << 30])
def test_the_batch_changes_nothing(batch_bytes: int) -> None:
    """Encoding together is for speed only."""
    for (n, a), (m, b) in zip(
        codes_and_scales(), quantize_stream(weights(), FP8, batch_bytes=batch_bytes), strict=True
    ):
        assert n == m and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_the_batch_bounds_what_is_held() -> None:
    """With a batch of 1 byte the stream may take one tensor ahead, no more: the model is never in memory."""
    taken = 0

    def source() -> Iterator[tuple[str, Tensor]]:
        nonlocal taken
        for name, t in weights():
            taken += 1
            yield name, t

    given = 0
    for name, _ in quantize_stream(source(), FP8, batch_bytes=1):
        given += not name.endswith("_scale_inv")
        assert taken == given


def test_a_weight_that_is_not_finite_is_named() -> None:
    """The trainer has diverged, or the file is broken."""
    bad = weights()
    bad[1][1][3, 3] = float("nan")
    with refuses(ValueError, Q):
        list(quantize_stream(bad, FP8))


@pytest.mark.parametrize("order", ["as written", "scales first", "scales last"])
@pytest.mark.parametrize("with_lookup", [False, True])
def test_pairs_are_found_in_any_order(order: str, with_lookup: bool) -> None:
    """In a real checkpoint a scale may lie in an earlier or later file than its codes."""
    items = codes_and_scales()
    if order != "as written":
        items.sort(key=lambda item: item[0].endswith("_scale_inv") is (order == "scales last"))
    found = dict(pair_stream(items, FP8, lookup=dict(items).get if with_lookup else None))
    assert set(found) == {n for n, _ in weights()}
    codec = make_codec(FP8)
    for name, w in weights():
        value = found[name]
        if not FP8.covers(name, w.shape):
            assert isinstance(value, Tensor) and torch.equal(value, w)
            continue
        assert isinstance(value, QuantTensor)
        assert torch.equal(codec.decode(value), codec.decode(codec.encode({name: w})[name]))


def test_dequantize_decodes_and_drops_scales() -> None:
    """Names must be those before quantization; what was not quantized is bit-equal."""
    back = dict(dequantize_stream(codes_and_scales(), FP8))
    assert list(back) == [n for n, _ in weights()]
    codec = make_codec(FP8)
    for name, w in weights():
        quantized = FP8.covers(name, w.shape)
        want = codec.decode(codec.encode({name: w})[name], torch.bfloat16) if quantized else w
        assert back[name].dtype is torch.bfloat16 and torch.equal(back[name], want)


def test_scales_in_bf16_become_fp32() -> None:
    """Some published FP8 checkpoints store them so; bf16 widens exactly."""
    items = [(n, t.to(torch.bfloat16) if n.endswith("_scale_inv") else t) for n, t in codes_and_scales()]
    value = dict(pair_stream(items, FP8))[Q]
    assert isinstance(value, QuantTensor)
    assert torch.equal(value.stored["weight_scale_inv"], dict(items)[SCALE].float())


def without(name: str) -> list[tuple[str, Tensor]]:
    return [item for item in codes_and_scales() if item[0] != name]


def replaced(name: str, value: Tensor) -> list[tuple[str, Tensor]]:
    return [(n, value if n == name else t) for n, t in codes_and_scales()]


@pytest.mark.parametrize("with_lookup", [False, True])
def test_codes_without_scale_are_refused(with_lookup: bool) -> None:
    """They would be read as weights of order 100."""
    items = without(SCALE)
    with refuses(ValueError, Q):
        list(pair_stream(items, FP8, lookup=dict(items).get if with_lookup else None))


def test_a_scale_without_codes_is_refused() -> None:
    """A weight was lost."""
    with refuses(ValueError, SCALE):
        list(pair_stream(without(Q), FP8))


@pytest.mark.parametrize(
    ("scale", "facts"),
    [
        (torch.ones(2, 2), ("(2, 2)", "(3, 2)")),
        (torch.ones(3, 2, dtype=torch.float64), ("torch.float64",)),
        (-torch.ones(3, 2), ()),
        (torch.full((3, 2), float("nan")), ()),
    ],
)
def test_scales_that_cannot_be_right_are_refused(scale: Tensor, facts: Facts) -> None:
    """A wrong shape is a wrong block size; the rest is a broken file."""
    with refuses(ValueError, SCALE, *facts):
        list(pair_stream(replaced(SCALE, scale), FP8))


def test_codes_that_are_nan_are_refused() -> None:
    """The format's only code that is not a number, in either sign."""
    codes = dict(codes_and_scales())[Q].clone()
    codes.view(torch.uint8)[1, 1] = 0xFF
    with refuses(ValueError, Q, "NaN"):
        list(pair_stream(replaced(Q, codes), FP8))


@pytest.mark.parametrize("spec", [None, QuantSpec(format=QuantFormat.BF16)])
def test_codes_of_a_model_that_is_not_quantized_are_refused(spec: QuantSpec | None) -> None:
    """Weights and config.json do not belong together."""
    with refuses(ValueError, Q, "quantization_config"):
        list(pair_stream(codes_and_scales(), spec))


def test_codes_that_wait_are_bounded() -> None:
    """Without a look-up, scales at the far end of a stream would pile up the model."""
    items = sorted(codes_and_scales(), key=lambda item: item[0].endswith("_scale_inv"))
    with refuses(ValueError, 2, 372, "model.layers.0.self_attn.q_proj.weight"):
        list(pair_stream(items, FP8, held_bytes=200))
