"""Fake quantization of activations: values of the codec by group, gradients as if nothing was rounded."""

from __future__ import annotations

import pytest
import torch

from quant.qat import activation_codec, fake_activations, straight_through
from quant.registry import CODECS
from quant.spec import QuantFormat, QuantSpec
from tests.support.refusals import refuses

WIDTHS = {QuantFormat.FP8: 128, QuantFormat.FP8_UE8M0: 128, QuantFormat.MXFP8: 32}


@pytest.mark.parametrize("format", [f for f in WIDTHS if f in CODECS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_group_of_a_token_is_a_weight_of_its_own(format: QuantFormat, dtype: torch.dtype) -> None:
    codec, width = activation_codec(QuantSpec(format=format)), WIDTHS[format]
    x = (torch.randn(3, 5, 2 * width) * torch.logspace(-3, 3, 5)[:, None]).to(dtype)
    x[0, 0] = 0
    got = fake_activations(codec, x)
    assert got.dtype is dtype and got.shape == x.shape
    for row, out in zip(x.view(-1, width), got.view(-1, width), strict=True):
        want = codec.decode(codec.encode({"w": row[None]})["w"])[0]
        assert torch.equal(out, want.to(dtype))


def test_the_gradient_is_that_of_the_identity() -> None:
    codec = activation_codec(QuantSpec(format=QuantFormat.FP8))
    x = torch.randn(4, 256, requires_grad=True)
    grad = torch.randn(4, 256)
    (fake_activations(codec, x) * grad).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, grad)
    w = torch.randn(2, 2, requires_grad=True)
    assert torch.equal(straight_through(w, torch.ones(2, 2)), torch.ones(2, 2))


def test_what_is_not_finite_stays_so_and_leaves_other_groups_alone() -> None:
    codec = activation_codec(QuantSpec(format=QuantFormat.FP8))
    x = torch.randn(3, 256)
    want = fake_activations(codec, x)
    x[1, 130] = torch.inf
    got = fake_activations(codec, x)
    assert torch.isinf(got[1, 130])
    keep = torch.ones(3, 256, dtype=torch.bool)
    keep[1, 128:] = False
    assert torch.equal(got[keep], want[keep])


def test_no_tokens_are_no_work() -> None:
    codec = activation_codec(QuantSpec(format=QuantFormat.FP8))
    assert fake_activations(codec, torch.zeros(0, 128)).shape == (0, 128)


def test_refusals() -> None:
    with refuses(ValueError, 192, 128):
        fake_activations(activation_codec(QuantSpec(format=QuantFormat.FP8)), torch.zeros(2, 192))
    with refuses(ValueError, "int4"):
        activation_codec(QuantSpec(format=QuantFormat.INT4))
