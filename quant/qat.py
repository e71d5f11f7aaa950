"""Quantization-aware training: forward with the rounded values that are served, straight-through gradients backward.

The trainer and the embedded engine quantize activations with the same function, so both multiply the same numbers.

Letters: T tokens, k columns.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from quant.formats.codec import Codec
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec

_ACTIVATIONS = {
    QuantFormat.FP8: (1, 128),
    QuantFormat.FP8_UE8M0: (1, 128),
    QuantFormat.MXFP8: (1, 32),
}


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def straight_through(x: Tensor, value: Tensor) -> Tensor:
    """Returns `value`, computed from `x` with the same shape and dtype; the gradient goes to x unchanged."""
    out: Tensor = _Through.apply(x, value)  # type: ignore[no-untyped-call]
    return out


def activation_codec(spec: QuantSpec) -> Codec:
    """The codec for the inputs of linears with weights stored according to `spec`: one scale per 128 columns of a
    token, 32 in MXFP8, by the rule of the weights' scales. Raises ValueError for a format whose activations are not
    quantized."""
    if spec.format not in _ACTIVATIONS:
        raise ValueError(
            f"activations are not quantized with {spec.format} weights, only with "
            f"{', '.join(_ACTIVATIONS)}: set precision.activations = 'none'"
        )
    return make_codec(QuantSpec(format=spec.format, block=_ACTIVATIONS[spec.format], convention=spec.convention))


def fake_activations(codec: Codec, x: Tensor) -> Tensor:
    """x [..., k] of any float dtype -> its bf16 copy, quantized and decoded, in x's dtype; straight-through gradient.

    The values of a row depend on that row alone. Groups that are not finite stay unchanged, so that later checks find
    their origin. Raises ValueError where k is not a multiple of the codec's group.
    """
    if not x.numel():
        return x
    rows = x.detach().reshape(-1, x.shape[-1])
    group = codec.block[1]
    if rows.shape[1] % group:
        raise ValueError(
            f"inputs of {rows.shape[1]} columns are not a multiple of the {group} that share a scale: set "
            "precision.activations = 'none'"
        )
    if math.isfinite(float(codec.amax(rows))):
        value = codec.fake({"activations": rows})["activations"]
    else:
        groups = rows.to(torch.bfloat16).view(-1, group)
        finite = groups.isfinite().all(1, keepdim=True)
        quiet = torch.where(finite, groups, 0.0).view(rows.shape)
        value = codec.fake({"activations": quiet})["activations"]
        value = torch.where(finite, value.view(groups.shape), groups)
    return straight_through(x, value.to(x.dtype).view(x.shape))
