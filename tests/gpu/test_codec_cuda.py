"""Codecs on CUDA tensors give the bits that they give on the CPU, by PyTorch and by Triton kernels.

Not covered: a product with the codes themselves, which is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from quant.formats.codec import Codec, QuantTensor
from quant.kernels.choice import VARIABLE, uses_triton
from quant.registry import CODECS, make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.support.interpreted_codecs import NAME, SPECS, bundles, random_codes, same, same_numbers

pytestmark = [pytest.mark.gpu, pytest.mark.slow]  # Triton starts compilers


@pytest.fixture(params=["torch", "triton"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What computes on the device."""
    monkeypatch.setenv(VARIABLE, "1" if request.param == "triton" else "0")
    assert uses_triton(torch.zeros(1, device="cuda")) is (request.param == "triton")
    return request.param


def _there(bundle: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights on the device with the strides and the offset that they have here."""
    found = {}
    for name, w in bundle.items():
        storage = torch.empty(w.untyped_storage().nbytes() // w.element_size(), dtype=w.dtype, device="cuda")
        found[name] = storage.as_strided(w.shape, w.stride(), w.storage_offset()).copy_(w)
    return found


def _compare(codec: Codec, bundle: Mapping[str, Tensor]) -> None:
    there = _there(bundle)
    here, encoded, fake = codec.encode(bundle), codec.encode(there), codec.fake(there)
    for name, q in here.items():
        for leaf, part in q.stored.items():
            assert same(part, encoded[name].stored[leaf].cpu()), (name, leaf)
        for dtype in (torch.bfloat16, torch.float32):
            assert same(codec.decode(q, dtype), codec.decode(encoded[name], dtype).cpu()), (name, dtype)
        assert same(codec.decode(q), fake[name].cpu()), name
    shape = next(iter(here.values())).shape
    alike = [name for name, q in here.items() if q.shape == shape]
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        out = torch.empty(len(alike), *shape, dtype=dtype, device="cuda")
        stacked = {leaf: torch.stack([encoded[n].stored[leaf] for n in alike]) for leaf in codec.stored}
        found = codec.decode_stored(stacked, out).cpu()
        for one, name in zip(found, alike, strict=True):
            assert same(one, codec.decode(here[name]).to(dtype)), (name, dtype)


def _experts() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (768, 2048), "up_proj": (768, 2048), "down_proj": (2048, 768)}
    out = {NAME.format(7, p): torch.randn(shape, generator=g) * 0.02 for p, shape in shapes.items()}
    out[NAME.format(7, "gate_proj")][:128, :128] = 0
    out[NAME.format(7, "up_proj")][5, 7] = 3e38
    out[NAME.format(7, "down_proj")][0] *= 2.0**-120
    return {name: w.to(torch.bfloat16) for name, w in out.items()}


@pytest.mark.parametrize("fmt", list(CODECS), ids=str)
def test_cuda_equals_cpu(fmt: QuantFormat, by: str) -> None:
    """A rank on a GPU and a server or converter on a CPU must agree on every code: large, tiny and zero blocks too."""
    _compare(make_codec(QuantSpec(format=fmt)), _experts())


@pytest.mark.parametrize("case", list(SPECS))
def test_every_kind_of_weight_and_block(case: str, by: str) -> None:
    """Ragged edges, strides, -0, subnormal and largest numbers, several weights at once."""
    codec = make_codec(SPECS[case])
    for bundle in bundles(codec):
        _compare(codec, bundle)


@pytest.mark.parametrize("case", list(SPECS))
def test_random_codes_decode_alike(case: str, by: str) -> None:
    codec = make_codec(SPECS[case])
    q = random_codes(codec)
    there = QuantTensor({leaf: t.cuda() for leaf, t in q.stored.items()}, q.shape)
    for dtype in (torch.bfloat16, torch.float32):
        assert same_numbers(codec.decode(q, dtype), codec.decode(there, dtype).cpu()), dtype


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("case", list(SPECS))
def test_a_weight_that_is_not_finite_is_named(case: str, value: float, by: str) -> None:
    codec = make_codec(SPECS[case])
    bundle = {NAME.format(i, "down_proj"): torch.ones(5, codec.block[1] * 2, device="cuda") for i in range(3)}
    bundle[NAME.format(1, "down_proj")][3, -1] = value
    for act in (codec.encode, codec.fake):
        with pytest.raises(ValueError, match=r"experts\.1\.down_proj\.weight: the weight.* NaN or infinite"):
            act(bundle)
