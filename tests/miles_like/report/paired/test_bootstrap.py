"""The paired bootstrap: what it says of two models that answered the same problems."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.report.paired.bootstrap import MOST, difference


def scores(values: object) -> dict[str, float]:
    return {f"p{i}": float(v) for i, v in enumerate(np.asarray(values))}


def test_the_error_is_that_of_a_mean_of_differences_and_not_of_two_means() -> None:
    """sigma / sqrt(P), which the resamples estimate; models that agree on most problems differ with little noise, how
    hard these may be."""
    draw = np.random.default_rng(1)
    hard = draw.random(400)
    before, after = hard, hard - 0.02 + draw.normal(0, 0.05, 400)
    found = difference(scores(before), scores(after), resamples=4000)
    assert found is not None and found.problems == 400
    assert found.error == pytest.approx((after - before).std(ddof=1) / 20, rel=0.05)
    assert found.fallen == pytest.approx(-(after - before).mean() / found.error) and found.fallen > 5
    unpaired = math.hypot(before.std(ddof=1), after.std(ddof=1)) / 20
    assert found.error < unpaired / 5
    assert found.low < found.change < found.high < 0


def test_a_fall_by_noise_alone_is_seldom_above_three_errors_and_a_planted_one_is_found() -> None:
    """Over 300 pairs of models of equal strength with answers right or wrong."""
    draw, fallen = np.random.default_rng(2), []
    for _ in range(300):
        p = draw.random(100)
        one, other = (draw.random((2, 100)) < p).astype(float)
        found = difference(scores(one), scores(other), resamples=200)
        assert found is not None
        fallen.append(found.fallen)
    assert np.mean(np.abs(fallen) > 3) < 0.02 and abs(np.mean(fallen)) < 0.2
    assert np.std(fallen) == pytest.approx(1.0, abs=0.15)
    worse = difference(scores(np.ones(100)), scores(np.arange(100) % 5 > 0))
    assert worse is not None and worse.fallen > 3


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=40), st.randoms())
def test_it_depends_on_the_scores_and_the_seed_and_not_on_their_order(pairs: list[tuple[float, float]], r: Any) -> None:
    before, after = scores([a for a, _ in pairs]), scores([b for _, b in pairs])
    names = list(before)
    r.shuffle(names)
    shuffled = {name: before[name] for name in names}
    found = difference(before, after, resamples=50)
    assert found == difference(shuffled, after, resamples=50)
    turned = difference(after, before, resamples=50)
    assert found is not None and turned is not None
    assert turned.fallen == pytest.approx(-found.fallen) and abs(found.fallen) <= MOST


def test_what_differs_by_the_same_everywhere_has_no_noise() -> None:
    same = difference(scores([0.5] * 4), scores([0.5] * 4))
    lower = difference(scores([1.0] * 4), scores([0.0] * 4))
    assert same is not None and lower is not None
    assert same.fallen == 0 and lower.fallen == MOST and lower.error == 0


def test_problems_of_one_side_alone_do_not_count_and_one_problem_is_too_few() -> None:
    found = difference({"a": 1.0, "b": 0.0, "c": 1.0}, {"b": 1.0, "c": 1.0, "d": 0.0})
    assert found is not None and found.problems == 2 and found.before == 0.5 and found.after == 1.0
    assert difference({"a": 1.0, "b": 0.0}, {"b": 1.0}) is None


def test_many_problems_are_drawn_in_blocks() -> None:
    draw = np.random.default_rng(3)
    values = draw.normal(-0.1, 1, 6_000_000 // 100)
    found = difference(scores(np.zeros_like(values)), scores(values), resamples=150)
    assert found is not None and found.error == pytest.approx(values.std() / math.sqrt(len(values)), rel=0.2)
