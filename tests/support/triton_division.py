"""The division of the codecs' kernels, next to the middles between two codes, where a last bit decides."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quant.kernels.arithmetic import divided

# numbers in the middle of two neighbouring values of codes; those of e4m3 repeat with each power of two
MIDDLES = {
    "int4": [k + 0.5 for k in range(8)],
    "e2m1": [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0],
    "e4m3": [*((k + 0.5) / 8 for k in range(8, 16)), *((k + 0.5) * 2.0**-9 for k in range(8))],
}
_AROUND = 16


@triton.jit
def _quotients(x, by, out, n, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    b = tl.load(by + at, mask=at < n, other=1.0)
    tl.store(out + at, divided(tl.load(x + at, mask=at < n, other=1.0), b, tl.div_rn(1.0, b)), mask=at < n)


def pairs(middles: list[float]) -> tuple[Tensor, Tensor, Tensor]:
    """All bf16 mantissas x, and all fp32 numbers `by` with which x / by is within 16 units in the last place of a
    middle; fp32, flat. Farther away two quotients that are each wrong by less than two units have the same code."""
    x = (1 + torch.arange(128) / 128.0)[:, None, None]
    middle = torch.tensor(middles)[:, None]
    nearest = (x / middle).view(torch.int32) + torch.arange(-_AROUND, _AROUND + 1, dtype=torch.int32)
    by = nearest.view(torch.float32)
    return x.expand_as(by).flatten(), by.flatten(), middle.expand_as(by).flatten()


def different(middles: list[float]) -> int:
    """Pairs whose quotient is on another side of the middle than IEEE division's, or not at it as that is."""
    x, by, middle = pairs(middles)
    found = torch.empty_like(x)
    _quotients[(triton.cdiv(len(x), 4096),)](x, by, found, len(x), TILE=4096)
    return int(((found - middle).sign() != (x / by - middle).sign()).sum())
