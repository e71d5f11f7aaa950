"""A rank on fake tensors rounds its weights by every codec: no number is read but in a place that has one.

Not covered: the memory of the rounded weights (test_measured_ranks.py).
"""

from __future__ import annotations

import pytest
import torch

from megatron_bridge.fake.substitutes.tensors import RankMode
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec


@pytest.mark.parametrize("fmt", [f for f in QuantFormat if f is not QuantFormat.BF16])
def test_fake_weights_are_rounded(fmt: QuantFormat) -> None:
    codec, mode = make_codec(QuantSpec(format=fmt)), RankMode(torch.device("cpu"))
    weight = mode.of(torch.empty(256, 512, dtype=torch.bfloat16))
    with mode:
        found = codec.fake(dict.fromkeys(codec.bundle_of("model.layers.0.mlp.down_proj.weight"), weight))
    assert {(x.shape, x.dtype) for x in found.values()} == {(weight.shape, torch.bfloat16)}
