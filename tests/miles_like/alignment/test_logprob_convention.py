"""Of which token a reported log-probability is, and of how much of the vocabulary: faults are found,
and what agrees is not called shifted or renormalised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.alignment.logprob_convention import is_renormalized, shift_of

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


def of_a_cut(seed: int, *, top_p: float = 1.0, top_k: int = -1, renormalised: bool = True) -> Sides:
    """Eight answers of 30 tokens, sampled from what is left of 64 tokens; both sides differ by rounding."""
    g = torch.Generator().manual_seed(seed)
    own, reported, masks = [], [], []
    for _ in range(8):
        p = (1.5 * torch.randn(32, 64, generator=g)).softmax(-1)
        order = p.sort(-1, descending=True)
        left = (order.values.cumsum(-1) - order.values <= top_p) & (torch.arange(64) < (top_k if top_k > 0 else 64))
        q = torch.where(left, order.values, 0.0)
        picked = q.multinomial(1, generator=g)
        mine = order.values.gather(1, picked)[:, 0].log()
        part = q.sum(-1).log() if renormalised else torch.zeros(32)
        own.append(mine)
        reported.append((mine - part) * (1 + 0.002 * torch.randn(32, generator=g)))
        masks.append(torch.arange(32) >= 2)
    return own, reported, masks


CUTS = [{"top_p": 0.8}, {"top_k": 4}, {"top_k": 4, "top_p": 0.95}, {"top_k": 40, "top_p": 0.8}]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_renormalised_after_a_cut_is_found(cut: dict[str, Any], seed: int) -> None:
    assert is_renormalized(*of_a_cut(seed, **cut), **cut)


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_what_is_not_renormalised_is_not_of_the_cut(cut: dict[str, Any], seed: int) -> None:
    assert not is_renormalized(*of_a_cut(seed, **cut, renormalised=False), **cut)
