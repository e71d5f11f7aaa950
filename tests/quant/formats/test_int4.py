"""INT4: the packed words, the scale that is rounded first, stability, refusals."""

from __future__ import annotations

import pytest
import torch

from quant.formats.int4 import Int4Codec
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.support.refusals import refuses

CODEC = make_codec(QuantSpec(format=QuantFormat.INT4))


def test_packed_words() -> None:
    """compressed-tensors' order: eight columns a word, the first in the lowest bits, 8 more than the integer."""
    w = torch.zeros(2, 32)
    w[:, :8] = torch.arange(-7, 1)
    w[:, 8:16] = torch.arange(0, 8)
    q = CODEC.encode({"w": w})["w"]
    assert {n: (p.dtype, tuple(p.shape)) for n, p in q.stored.items()} == {
        "weight_packed": (torch.int32, (2, 4)),
        "weight_scale": (torch.bfloat16, (2, 1)),
        "weight_shape": (torch.int64, (2,)),
    }
    words = [f"{int(x) & 0xFFFFFFFF:08x}" for x in q.stored["weight_packed"][1]]
    assert words == ["87654321", "fedcba98", "88888888", "88888888"]
    assert q.stored["weight_shape"].tolist() == [2, 32] and q.stored["weight_scale"].tolist() == [[1.0], [1.0]]
    eight = {**q.stored, "weight_packed": torch.full((2, 4), 0x76543210, dtype=torch.int32)}
    assert CODEC.decode(CODEC.adopt("m.weight", eight))[0, :8].tolist() == list(range(-8, 0))  # -8 is read


def test_the_scale_is_rounded_before_the_integers_are_chosen() -> None:
    """Of 1000 weights some fall to another integer with the unrounded scale: those would differ in the rollout."""
    w = (torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 0.02).to(torch.bfloat16)
    groups = w.float().view(64, 2, 32)
    exact = groups.abs().amax(2, keepdim=True) / 7
    s = exact.to(torch.bfloat16).float()
    want = ((groups / s).round().clamp(-7, 7) * s).to(torch.bfloat16).view(64, 64)
    assert torch.equal(CODEC.fake({"w": w})["w"], want)
    assert int(((groups / s).round() != (groups / exact).round()).sum()) > 0


def test_tiny_weights_have_the_least_scale() -> None:
    """bf16(1e-5), as a scale of zero would divide by zero; weights below half of it are zero."""
    w = torch.zeros(1, 64)
    w[0, 32:] = 3e-6
    q = CODEC.encode({"w": w})["w"]
    assert q.stored["weight_scale"].tolist() == [[torch.tensor(1e-5).to(torch.bfloat16).item()] * 2]
    assert not CODEC.decode(q).any()


def test_every_scale_that_bf16_weights_have_is_stable() -> None:
    """14 of 128 mantissas of bf16 scales are no fixed points of s -> bf16(bf16(7 s) / 7); no bf16 weight leads there.

    All finite magnitudes, the largest of their group: stored, decoded and stored again the values are the same, finite.
    """
    w = torch.zeros(0x7F80, 32, dtype=torch.bfloat16)
    w[:, 7] = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    w[:, 8] = -w[:, 7] / 3
    once = CODEC.fake({"w": w})["w"]
    assert bool(once.isfinite().all())
    assert torch.equal(CODEC.fake({"w": once})["w"], once)
    s = torch.arange(0x3F80, 0x4000, dtype=torch.int16).view(torch.bfloat16).float()
    again = ((7 * s).to(torch.bfloat16).float() / 7).to(torch.bfloat16).float()
    assert int((again != s).sum()) == 14


@pytest.mark.parametrize("group", [8, 32, 64, 128])
def test_groups(group: int) -> None:
    """One scale for so many columns, of those alone."""
    codec = make_codec(QuantSpec(format=QuantFormat.INT4, block=(1, group)))
    w = torch.randn(3, 256)
    q = codec.encode({"w": w})["w"]
    assert q.stored["weight_scale"].shape == (3, 256 // group)
    part = codec.encode({"w": w[:, group : 2 * group]})["w"]
    assert torch.equal(q.stored["weight_scale"][:, 1:2], part.stored["weight_scale"])


def test_parts_that_do_not_fit_are_refused() -> None:
    """Another group, a shape that is another weight's, scales that are not numbers. int32 shapes are Miles' own."""
    q = CODEC.encode({"w": torch.randn(4, 64)})["w"]
    CODEC.adopt("m.weight", {**q.stored, "weight_shape": torch.tensor([4, 64], dtype=torch.int32)})
    for leaf, bad, facts in (
        ("weight_shape", torch.tensor([4, 60]), ("[4, 60]", "[4, 64]")),
        ("weight_scale", torch.ones(4, 1, dtype=torch.bfloat16), ("(4, 1)", "(4, 2)")),
        ("weight_scale", torch.full((4, 2), float("nan"), dtype=torch.bfloat16), ()),
        ("weight_scale", -torch.ones(4, 2, dtype=torch.bfloat16), ()),
        ("weight_packed", torch.zeros(4, 8, dtype=torch.uint8), ("torch.uint8",)),
    ):
        with refuses(ValueError, f"m.{leaf}", *facts):
            CODEC.adopt("m.weight", {**q.stored, leaf: bad})
    with refuses(ValueError, "bf16"):
        Int4Codec(QuantSpec(format=QuantFormat.BF16))
