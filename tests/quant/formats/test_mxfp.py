"""MXFP8 and MXFP4: exponents beside powers of two, edges, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quant.formats.codec import QuantTensor
from quant.formats.minifloat import e8m0_decode
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from tests.support.minifloat_rounding import e8m0_encode
from tests.support.refusals import refuses

MXFP8 = make_codec(QuantSpec(format=QuantFormat.MXFP8))
MXFP4 = make_codec(QuantSpec(format=QuantFormat.MXFP4))
EVERY = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)  # every finite bf16 magnitude


def groups_of(amax: Tensor) -> Tensor:
    """[n, 32], each row with one value and its half."""
    w = torch.zeros(len(amax), 32, dtype=torch.bfloat16)
    w[:, 3], w[:, 30] = -amax, amax / 2
    return w


def exponents(codec_name: str, amax: Tensor) -> list[int]:
    codec = MXFP8 if codec_name == "mxfp8" else MXFP4
    q = codec.encode({"w": groups_of(amax)})["w"]
    return [int(b) - 127 for b in list(q.stored.values())[1][:, 0]]


def test_exponents_beside_powers_of_two() -> None:
    """MXFP8 at 448 * 2^k and one bf16 step to either side; MXFP4 at 2^k and the same."""
    ks = range(-100, 100)
    for name, unit, above in (("mxfp8", 448.0, 1), ("mxfp4", 4.0, 0)):
        at = torch.tensor([unit * 2.0**k for k in ks], dtype=torch.bfloat16)
        low, high = ((at.view(torch.int16) + d).view(torch.bfloat16) for d in (-1, 1))
        assert exponents(name, at) == list(ks)
        assert exponents(name, high) == [k + above for k in ks]
        assert exponents(name, low) == [k - (1 - above) for k in ks]


def test_every_exponent_is_the_references() -> None:
    """All magnitudes of bf16, by minifloat's bits: amax / 448 rounded up, amax / 4 down, at least 2^-127."""
    want8, want4 = e8m0_encode(EVERY.double().div(448).float(), up=True), e8m0_encode(EVERY.float() / 4, up=False)
    assert exponents("mxfp8", EVERY) == (want8.int() - 127).tolist()
    assert exponents("mxfp4", EVERY) == (want4.int() - 127).tolist()


def test_mxfp8_never_saturates_and_mxfp4_does() -> None:
    """What the two rules are: 449 takes the next power of two; 7.9 * 2^k becomes 6 * 2^k."""
    w = groups_of(torch.tensor([450.0, 7.9375]))
    assert MXFP8.fake({"w": w})["w"][:, 3].tolist() == [-448.0, -8.0]
    assert MXFP4.fake({"w": w})["w"][:, 3].tolist() == [-384.0, -6.0]  # 450 / 64 = 7.03
    assert MXFP4.fake({"w": w})["w"][:, 30].tolist() == [256.0, 4.0]


def test_golden_parts() -> None:
    """By hand: amax 6 has scale 1 in MXFP4 and 2^-6 in MXFP8; the even column lies in the low nibble."""
    w = torch.zeros(1, 32, dtype=torch.bfloat16)
    w[0, :8] = torch.tensor([0.5, -1, 1.5, 2, -3, 4, 6, -0.25])
    q = MXFP4.encode({"w": w})["w"].stored
    assert {k: v.dtype for k, v in q.items()} == {"weight_packed": torch.uint8, "weight_scale": torch.uint8}
    assert q["weight_packed"][0, :4].tolist() == [0xA1, 0x43, 0x6D, 0x87] and q["weight_scale"].tolist() == [[127]]
    q = MXFP8.encode({"w": w})["w"].stored
    assert list(q) == ["weight", "weight_scale_inv"] and q["weight_scale_inv"].tolist() == [[121]]
    assert q["weight"][0, :8].float().tolist() == [32, -64, 96, 128, -192, 256, 384, -16]
    sizes = MXFP8.layout((576, 7168))
    assert sizes["weight_scale_inv"] == (torch.uint8, (576, 224))
    assert MXFP4.layout((576, 7168))["weight_packed"] == (torch.uint8, (576, 3584))


def test_zero_groups_have_the_least_scale() -> None:
    """Code 0, 2^-127: no special case for any reader, and the values are zero."""
    for codec in (MXFP8, MXFP4):
        q = codec.encode({"w": torch.zeros(3, 64)})["w"]
        assert not list(q.stored.values())[1].any()
        assert torch.equal(codec.decode(q), torch.zeros(3, 64, dtype=torch.bfloat16))


def test_subnormal_and_largest_weights() -> None:
    """Decoding every magnitude gives finite numbers, within a 16th for MXFP8 where its grid has normal numbers."""
    w = groups_of(EVERY)
    d8, d4 = MXFP8.fake({"w": w})["w"].double(), MXFP4.fake({"w": w})["w"].double()
    assert bool(d8.isfinite().all()) and bool(d4.isfinite().all())
    x = EVERY.double()
    assert bool(((d8[:, 3] + x).abs() <= x / 16).all())
    assert bool(((d4[:, 3] + x).abs() <= torch.maximum(x / 4, torch.tensor(2.0**-129).double())).all())


@pytest.mark.parametrize("convention", ["sglang", "compressed-tensors"])
def test_conventions_differ_in_a_name_alone(convention: str) -> None:
    """What one wrote the other reads under its own name."""
    codec = make_codec(QuantSpec(format=QuantFormat.MXFP8, convention=convention))
    w = torch.randn(4, 64)
    q = codec.encode({"w": w})["w"]
    assert list(q.stored)[1] == ("weight_scale_inv" if convention == "sglang" else "weight_scale")
    assert torch.equal(codec.decode(q), MXFP8.fake({"w": w})["w"])


@pytest.mark.parametrize("format", [QuantFormat.MXFP8, QuantFormat.MXFP4])
def test_what_no_encoder_writes_is_refused(format: QuantFormat) -> None:
    """A scale of NaN or out of reach, a code that is NaN, parts of another shape."""
    codec = make_codec(QuantSpec(format=format))
    q = codec.encode({"w": torch.randn(2, 64)})["w"]
    codes, scale = q.stored
    for bad in (255, 254):
        broken = q.stored[scale].clone()
        broken[1, 0] = bad
        with refuses(ValueError, f"m.{scale}", bad):
            codec.adopt("m.weight", {**q.stored, scale: broken})
    with refuses(ValueError, f"m.{scale}", "(2, 3)", "(2, 2)"):
        codec.adopt("m.weight", {**q.stored, scale: torch.zeros(2, 3, dtype=torch.uint8)})
    if format is QuantFormat.MXFP8:
        broken = q.stored[codes].clone()
        broken.view(torch.uint8)[0, 0] = 0xFF
        with refuses(ValueError, "m.weight", "NaN"):
            codec.adopt("m.weight", {**q.stored, codes: broken})
    same = codec.adopt("m.weight", {**q.stored, scale: q.stored[scale].view(torch.float8_e8m0fnu)})
    assert torch.equal(e8m0_decode(same.stored[scale]), e8m0_decode(q.stored[scale]))


@pytest.mark.parametrize("format", [QuantFormat.MXFP8, QuantFormat.MXFP4, QuantFormat.NVFP4, QuantFormat.INT4])
def test_refusals_of_weights(format: QuantFormat) -> None:
    """Columns that are no multiple of the group, with both numbers; NaN and infinity, by the weight's name."""
    codec = make_codec(QuantSpec(format=format))
    with refuses(ValueError, "a.weight", 40, codec.block[1]):
        codec.encode({"a.weight": torch.zeros(4, 40)})
    with refuses(ValueError, 40):
        codec.layout((4, 40))
    for bad in (float("nan"), float("-inf"), 3.4e38):  # the last is infinite in bf16
        w = torch.ones(3, 64)
        w[2, 63] = bad
        with refuses(ValueError, "b.weight", "NaN"):
            codec.encode({"a.weight": torch.ones(3, 64), "b.weight": w})
        with refuses(ValueError, "b.weight", "NaN"):
            codec.fake({"a.weight": torch.ones(3, 64), "b.weight": w})


def test_a_codec_takes_its_own_format() -> None:
    """A registry that mixed them up would store what config.json does not say."""
    for format, other in ((QuantFormat.MXFP8, MXFP4), (QuantFormat.MXFP4, MXFP8)):
        with refuses(ValueError, format.value):
            type(other)(QuantSpec(format=format))


def parts_bytes(q: QuantTensor) -> int:
    return sum(p.numel() * p.element_size() for p in q.stored.values())


def test_bytes() -> None:
    """8.25 and 4.25 bits a weight."""
    w = torch.zeros(64, 128)
    for codec, bits in ((MXFP8, 8.25), (MXFP4, 4.25)):
        q = codec.encode({"w": w})["w"]
        assert q.nbytes == parts_bytes(q) == w.numel() * bits / 8
