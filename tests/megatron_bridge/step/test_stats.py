"""Statistics of micro-batches and optimizer steps, put together by hand.

A figure that is a mean where a sum is meant, or a minimum over micro-batches that had nothing to say, misleads quietly.
Not covered: the reduction over ranks, which laws/test_parallel_invariance compares in every layout.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_bridge.step.stats import combine, values
from miles_like.types import Reduce, Stat

HOW = {"mean": Reduce.MEAN, "sum": Reduce.SUM, "max": Reduce.MAX, "min": Reduce.MIN}


def part(count: float, **totals: float) -> dict[str, Stat]:
    return {k: Stat(torch.tensor(v), torch.tensor(count), HOW[k]) for k, v in totals.items()}


def test_each_kind_by_hand():
    parts = [part(2.0, mean=3.0, sum=3.0, max=2.0, min=1.0), part(1.0, mean=6.0, sum=6.0, max=6.0, min=6.0)]
    assert values(combine(parts)) == pytest.approx({"mean": 3.0, "sum": 9.0, "max": 6.0, "min": 1.0})


def test_a_micro_batch_without_tokens_changes_nothing():
    """It has no smallest: infinity loses to any."""
    one = part(2.0, mean=3.0, sum=3.0, max=2.0, min=1.0)
    nothing = part(0.0, mean=0.0, sum=0.0, max=0.0, min=math.inf)
    assert values(combine([nothing, one, nothing])) == values(one)
    assert values(nothing) == {}


def test_a_nan_stays_one():
    one, bad = part(2.0, mean=3.0, sum=3.0, max=2.0, min=1.0), part(1.0, **dict.fromkeys(HOW, math.nan))
    for parts in ([one, bad], [bad, one]):
        assert all(math.isnan(v) for v in values(combine(parts)).values())
