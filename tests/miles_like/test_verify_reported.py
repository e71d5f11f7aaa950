"""Of which token a reported log-probability is: shifts are found, and what agrees is not called shifted."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from miles_like.verify.reported import shift_of

Sides = tuple[list[Tensor], list[Tensor], list[Tensor]]


def sides(seed: int) -> Sides:
    """Eight answers of 3 to 5 tokens by a model that is sure of nearly all of them, as two kernels see them."""
    g = torch.Generator().manual_seed(seed)
    own, reported, masks = [], [], []
    for _ in range(8):
        s = 6 + int(torch.randint(3, 6, (1,), generator=g))
        logprobs = -2 * torch.rand(s, generator=g) ** 8
        rounding = 1 + 0.01 * torch.randn(s, generator=g)
        own.append(logprobs)
        reported.append(logprobs * rounding - 1e-4 * torch.randn(s, generator=g).abs())
        masks.append(torch.arange(s) >= 6)
    return own, reported, masks


# the first three were called shifted when the line before was fitted to more tokens than the line after
@pytest.mark.parametrize("seed", [1336, 2065, 2594, *range(40)])
def test_short_answers_of_a_sure_model_are_not_shifted(seed: int) -> None:
    assert shift_of(*sides(seed)) == 0


@pytest.mark.parametrize("d", [1, -1, 2])
def test_a_shift_is_found_in_them(d: int) -> None:
    own, reported, masks = sides(0)
    for x, m in zip(reported, masks, strict=True):
        x[m] = torch.roll(x[m], d)
    assert shift_of(own, reported, masks) == d
