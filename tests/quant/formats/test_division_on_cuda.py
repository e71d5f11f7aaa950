"""Scales are divided as on the CPU by CUDA's kernels too, which multiply by the reciprocal of a Python number.

The kernels' rule is applied to CPU tensors here; on a device the codes themselves are compared (tests/gpu). Not
covered: other operations that differ between devices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quant.formats.tiles import divide_
from quant.registry import CODECS, make_codec
from quant.spec import QuantFormat, QuantSpec

_DIVISIONS = (torch.ops.aten.div.Tensor, torch.ops.aten.div_.Tensor, torch.ops.aten.div.Scalar)


class CudaDivision(TorchDispatchMode):
    """x / number as torch's div_true_kernel_cuda computes it: x times the reciprocal, both in fp32."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (*_DIVISIONS, torch.ops.aten.div_.Scalar) and not isinstance(args[1], Tensor):
            x, reciprocal = args[0], (1.0 / torch.tensor(args[1], dtype=torch.float32))
            quotients = (x.float() * reciprocal).to(x.dtype)
            return x.copy_(quotients) if op in (torch.ops.aten.div_.Tensor, torch.ops.aten.div_.Scalar) else quotients
        return op(*args, **(kwargs or {}))


def _weights(number: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(number)
    expert = f"model.layers.3.mlp.experts.{number}."
    shapes = {"gate_proj": (256, 512), "up_proj": (256, 512), "down_proj": (512, 256)}
    return {
        f"{expert}{name}.weight": (torch.randn(shape, generator=g) * 0.02).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def test_the_kernels_rule_gives_other_bits() -> None:
    x = torch.arange(1, 10_000).float()
    expected = x / 448.0
    with CudaDivision():
        plain, found = x.clone().div_(448.0), divide_(x.clone(), 448.0)
    assert torch.equal(found, expected)
    assert (plain != expected).sum() > 1000


@pytest.mark.parametrize("fmt", list(CODECS), ids=str)
def test_codes_do_not_depend_on_it(fmt: QuantFormat) -> None:
    codec, weights = make_codec(QuantSpec(format=fmt)), _weights(7)
    expected, rounded = codec.encode(weights), codec.fake(weights)
    with CudaDivision():
        found, other = codec.encode(weights), codec.fake(weights)
    for name, q in expected.items():
        for leaf, part in q.stored.items():
            assert torch.equal(part.view(torch.uint8), found[name].stored[leaf].view(torch.uint8)), (name, leaf)
        assert torch.equal(rounded[name], other[name]), name
