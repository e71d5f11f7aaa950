"""Our e4m3 rounding against PyTorch's cast and against the table of the format."""

from __future__ import annotations

import torch
from torch import Tensor

from quant.minifloat import e4m3_decode, e4m3_encode

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
