"""Our rounding against PyTorch's casts, compressed-tensors', and the tables of the formats."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quant.formats.e2m1 import e2m1_codes
from quant.formats.lookup import e2m1_values, pack_nibbles
from quant.formats.minifloat import e8m0_decode
from tests.support.minifloat_rounding import e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, e8m0_encode

ALL_CODES = torch.arange(256, dtype=torch.uint8)


def torch_codes(x: Tensor) -> Tensor:
    """PyTorch's cast of values in range."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def test_every_code_decodes_as_pytorchs_does() -> None:
    """All 256 codes, -0 and both NaN among them, compared as bits."""
    want = ALL_CODES.view(torch.float8_e4m3fn).to(torch.float32)
    got = e4m3_decode(ALL_CODES)
    nan = torch.isnan(want)
    assert torch.equal(torch.isnan(got), nan) and int(nan.sum()) == 2
    assert torch.equal(got[~nan].view(torch.int32), want[~nan].view(torch.int32))


def test_every_value_is_its_own_rounding() -> None:
    """A value of the grid must not move."""
    finite = ALL_CODES[(ALL_CODES & 0x7F) != 0x7F]
    assert torch.equal(e4m3_encode(e4m3_decode(finite)), finite)


def test_midpoints_go_to_even_and_their_neighbours_to_the_nearer() -> None:
    """Ties are where rounding modes differ; one fp32 step beside them shows that nothing else is a tie."""
    grid = e4m3_decode(torch.arange(0x7F, dtype=torch.uint8))
    middle = (grid[1:] + grid[:-1]) / 2
    assert torch.equal(e4m3_encode(middle) & 1, torch.zeros_like(middle, dtype=torch.uint8))
    x = torch.cat(
        [middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9)), grid]
    )
    x = torch.cat([x, -x])
    assert torch.equal(e4m3_encode(x), torch_codes(x))


def test_random_values_round_as_pytorchs_do() -> None:
    """1e5 values over 60 binades: fp32 below the subnormals, subnormals, normals, beyond the largest."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=g) * torch.exp2(torch.randint(-40, 20, (100_000,), generator=g).float())
    assert torch.equal(e4m3_encode(x), torch_codes(x))


def test_special_values() -> None:
    """By the format's table: no infinity, so overflow saturates here; NaN stays NaN; zeros keep their sign."""
    x = torch.tensor([0.0, -0.0, 448.0, 464.0, 1e38, float("inf"), float("-inf"), float("nan"), 2**-9, 2**-10, 2**-149])
    want = torch.tensor([0x00, 0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7F, 0x01, 0x00, 0x00], dtype=torch.uint8)
    assert torch.equal(e4m3_encode(x), want)


def test_bf16_is_rounded_once() -> None:
    """bf16 widens exactly, so its codes must be those of the same value in fp32."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    assert torch.equal(e4m3_encode(x), e4m3_encode(x.float()))


ALL_NIBBLES = torch.arange(16, dtype=torch.uint8)


def test_e2m1_by_the_table() -> None:
    """Each value is its own rounding, each tie goes to even, what is beyond saturates, zeros keep their sign."""
    assert e2m1_decode(ALL_NIBBLES).tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(e2m1_encode(e2m1_decode(ALL_NIBBLES)), ALL_NIBBLES)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert e2m1_decode(e2m1_encode(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert e2m1_encode(-ties).tolist() == [8, 10, 10, 12, 12, 14, 14]
    assert e2m1_decode(e2m1_encode(torch.tensor([6.5, 1e38, float("inf"), -7.0]))).tolist() == [6, 6, 6, -6]
    with pytest.raises(ValueError, match="NaN"):
        e2m1_encode(torch.tensor([float("nan")]))


def test_the_fast_e2m1_is_the_reference() -> None:
    """Every bf16 magnitude that a quotient can have, the fp32 neighbours of each tie, and both signs."""
    x = torch.arange(0x4348, dtype=torch.int16).view(torch.bfloat16).float()  # 0 .. 200
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 8.0])
    beside = [torch.nextafter(ties, torch.tensor(way)) for way in (0.0, 100.0)]
    x = torch.cat([x, ties, *beside, torch.rand(20_000, generator=torch.Generator().manual_seed(2)) * 8])
    x = torch.cat([x, -x])[None, None]
    codes = e2m1_codes(x.to(torch.bfloat16), x.clone())
    want = e2m1_encode(x)
    assert torch.equal(codes, want) and bool((want == 8).any())


def test_e2m1_equals_compressed_tensors() -> None:
    """Its own rounding and packing, of values on and beside the grid."""
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
    from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4

    x = torch.cat([torch.linspace(-6, 6, 4801), -torch.zeros(1)])
    values = e2m1_decode(e2m1_encode(x))
    assert torch.equal(values, cast_to_fp4(x.clone()))
    packed = pack_nibbles(e2m1_encode(x)[None])
    assert torch.equal(packed, pack_fp4_to_uint8(values.to(torch.bfloat16)[None]))
    assert torch.equal(e2m1_values(packed).float(), unpack_fp4_from_uint8(packed, 1, x.numel()).float())


def test_e8m0() -> None:
    """All codes as PyTorch's type has them; the powers of two beside every number, by exact integers."""
    want = ALL_CODES.view(torch.float8_e8m0fnu).to(torch.float32)
    got = e8m0_decode(ALL_CODES)
    assert bool(torch.isnan(got[255])) and torch.equal(got[:255], want[:255])
    assert torch.equal(got[:255], torch.tensor([math.ldexp(1, b - 127) for b in range(255)]))
    for up in (False, True):
        assert torch.equal(e8m0_encode(got[:255], up=up), ALL_CODES[:255])
    below, above = ((got[1:254].view(torch.int32) + d).view(torch.float32) for d in (-1, 1))
    assert torch.equal(e8m0_encode(above, up=True), ALL_CODES[2:255])
    assert torch.equal(e8m0_encode(above, up=False), ALL_CODES[1:254])
    assert torch.equal(e8m0_encode(below, up=True), ALL_CODES[1:254])
    assert torch.equal(e8m0_encode(below, up=False), ALL_CODES[0:253])
    assert e8m0_encode(torch.tensor([0.0, 2.0**-149, 2.0**-127, 3.4e38]), up=True).tolist() == [0, 0, 0, 254]
