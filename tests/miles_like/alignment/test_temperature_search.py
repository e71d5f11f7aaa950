"""The temperature of reported log-probabilities is found to a thousandth in a few passes of the trainer, also where
some tokens differ for another reason; where no temperature explains a difference, none is found.

`score` here is softmax over made logits. Not covered: a model (tests/laws/test_verify_names_faults.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from miles_like.alignment.logprob_convention import temperature_of

TOKENS, VOCABULARY = 240, 50


class Side:
    """A trainer that counts its passes."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.logits = 3 * torch.randn(TOKENS, VOCABULARY, generator=g)
        self.tokens = torch.multinomial(self.logits.softmax(1), 1, generator=g)
        self.passes = 0

    def at(self, temperature: float) -> Sequence[Tensor]:
        found = (self.logits / temperature).log_softmax(1).gather(1, self.tokens)[:, 0]
        return found[:100], found[100:]

    async def score(self, temperature: float) -> Sequence[Tensor]:
        self.passes += 1
        return self.at(temperature)

    def find(self, reported: Sequence[Tensor], temperature: float = 1.0) -> float:
        masks = [torch.ones(len(x), dtype=torch.bool) for x in reported]
        found = temperature_of(self.score, self.at(temperature), reported, masks, temperature)
        return asyncio.run(found)[0]


@pytest.mark.parametrize("true", [0.15, 0.6, 0.9, 1.3, 2.5, 8.0])
@pytest.mark.parametrize("outliers", [0, 15])
def test_it_is_found_in_few_passes(true: float, outliers: int) -> None:
    side = Side(outliers)
    reported = [x + 1e-3 * torch.randn(len(x), generator=torch.Generator().manual_seed(1)) for x in side.at(true)]
    reported[1][:outliers] -= 0.3
    assert side.find(reported) == pytest.approx(true, rel=3e-3)
    assert side.passes <= 9


def test_noise_and_a_shift_have_none() -> None:
    side = Side(2)
    noisy = [x + 0.05 * torch.randn(len(x), generator=torch.Generator().manual_seed(3)) for x in side.at(1.0)]
    assert side.find(noisy) == 1.0
    assert side.find([x.roll(1) for x in side.at(1.0)]) == 1.0
