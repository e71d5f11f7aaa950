"""Codecs on CUDA tensors give the bits that they give on the CPU, from the same functions.

Not covered: a product with the codes themselves, which is the engine's.
"""

from __future__ import annotations

import pytest
import torch

from quant.registry import CODECS, make_codec
from quant.spec import QuantFormat, QuantSpec

pytestmark = pytest.mark.gpu


def _weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    e = "model.layers.3.mlp.experts.7."
    out = {
        e + "gate_proj.weight": torch.randn(768, 2048, generator=g) * 0.02,
        e + "up_proj.weight": torch.randn(768, 2048, generator=g) * 0.02,
        e + "down_proj.weight": torch.randn(2048, 768, generator=g) * 0.02,
    }
    out[e + "gate_proj.weight"][:128, :128] = 0
    out[e + "up_proj.weight"][5, 7] = 3e38
    out[e + "down_proj.weight"][0] *= 2.0**-120
    return {name: w.to(torch.bfloat16) for name, w in out.items()}


@pytest.mark.parametrize("fmt", list(CODECS), ids=str)
def test_cuda_equals_cpu(fmt: QuantFormat) -> None:
    """A rank on a GPU and a server or converter on a CPU must agree on every code: large, tiny and zero blocks too."""
    codec, here = make_codec(QuantSpec(format=fmt)), _weights()
    there = {name: w.cuda() for name, w in here.items()}
    fake, encoded, encoded_there = codec.fake(there), codec.encode(here), codec.encode(there)
    for name, q in encoded.items():
        for leaf, part in q.stored.items():
            other = encoded_there[name].stored[leaf].cpu()
            assert torch.equal(part.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), (name, leaf)
        value = codec.decode(q)
        assert torch.equal(value, codec.decode(encoded_there[name]).cpu()), name
        assert torch.equal(value, fake[name].cpu()), name
