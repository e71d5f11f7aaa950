"""Lengths against brute force, packs against their bounds.

Not covered: how well a log-normal describes a model's lengths.
"""

from __future__ import annotations

import itertools
import random

import pytest

from miles_like.timing.workload import Lengths, Workload, lengths_with_mean, packs_of
from tests.support.refusals import refuses


@pytest.mark.parametrize("mean", [5.0, 100.0, 700.0, 1400.0])
def test_lengths_have_the_given_mean_under_the_limit(mean: float) -> None:
    lengths = lengths_with_mean(mean, 1428.0)
    assert lengths.mean == pytest.approx(mean, rel=1e-6)
    assert list(lengths.knots) == sorted(lengths.knots) and lengths.knots[0] >= 1 and lengths.longest <= 1428
    assert lengths.of_n(3) == sorted(lengths.of_n(3))


def test_typical_lengths_have_the_distribution_s_mean() -> None:
    lengths = lengths_with_mean(700.0, 4000.0)
    for n in (8, 64, 1000):
        assert sum(lengths.of_n(n)) / n == pytest.approx(700)


def test_the_longest_of_n_is_that_of_drawn_samples() -> None:
    lengths, draw = lengths_with_mean(200.0, 10_000.0), random.Random(0)
    for n in (1, 4, 32):
        trials = [max(draw.choice(lengths.knots) for _ in range(n)) for _ in range(20_000)]
        assert lengths.expected_longest(n) == pytest.approx(sum(trials) / len(trials), rel=0.02)
    assert lengths.expected_longest(10**6) == pytest.approx(lengths.longest)


def test_a_mean_above_the_limit_is_refused() -> None:
    with refuses(ValueError, 50, 10):
        lengths_with_mean(50.0, 10.0)


def _load(groups: int, mean: float, limit: float, *, updates: int = 1) -> Workload:
    responses = lengths_with_mean(mean, limit)
    return Workload(groups=groups, samples_per_group=4, prompt=20.0, responses=responses, steps_per_rollout=updates)


def _fewest(lengths: list[int], capacity: int) -> int:
    """Bins of the best packing, by trying every assignment."""
    for bins in itertools.count(1):
        for places in itertools.product(range(bins), repeat=len(lengths)):
            used = [0] * bins
            for length, place in zip(lengths, places, strict=True):
                used[place] += length
            if max(used) <= capacity:
                return bins
    raise AssertionError


def test_packs_are_at_most_11_ninths_of_the_best() -> None:
    """First-fit decreasing's bound (Dosa 2007): 11/9 of the best packing and 6/9."""
    draw = random.Random(1)
    for _ in range(20):
        lengths = [draw.randint(10, 60) for _ in range(6)]
        load = Workload(
            groups=6, samples_per_group=1, prompt=0.0, responses=Lengths(tuple(sorted(map(float, lengths))))
        )
        packs = packs_of(load, 100, 1)
        assert _fewest(lengths, 100) <= packs.count <= 11 / 9 * _fewest(lengths, 100) + 6 / 9
        assert packs.count * packs.tokens == pytest.approx(sum(lengths))
        assert packs.count * packs.squares == pytest.approx(sum(x * x for x in lengths))


def test_packs_divide_over_ranks_and_updates() -> None:
    load = _load(64, 300.0, 2000.0)
    whole = packs_of(load, 4096, 1)
    assert whole.count >= load.tokens / 4096
    assert packs_of(load, 4096, 4).count == pytest.approx(whole.count / 4, abs=2)
    assert packs_of(_load(64, 300.0, 2000.0, updates=4), 4096, 1).count == pytest.approx(whole.count / 4, abs=2)
    for multiple in (4, 8):
        assert packs_of(load, 4096, 2, multiple=multiple).count % multiple == 0
    assert packs_of(load, 8192, 1).count < whole.count


def test_a_step_s_tokens() -> None:
    load = _load(8, 100.0, 500.0)
    assert load.samples == 32 and load.tokens == pytest.approx(32 * 120) and load.sampled == pytest.approx(3200)
