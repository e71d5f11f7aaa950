"""Curves of a page: few points, none of a run's extremes lost.

The oracle of a running mean is pandas. Not covered: how many points a reader needs.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_like.page.curves import LAYER, Rises, columns, curve, gantt, layer_grid, places, running_means, short


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.sampled_from([4, 10, 100, 1000]))
def test_a_curve_has_few_points_and_keeps_extremes(values: list[float], points: int) -> None:
    kept = places(values, points)
    assert kept == sorted(set(kept)) and len(kept) <= max(points, 1)
    assert min(values) == min(values[i] for i in kept) and max(values) == max(values[i] for i in kept)
    assert len(values) > points or kept == list(range(len(values)))


def test_a_spike_of_one_step_of_ten_thousand_is_drawn_at_its_step() -> None:
    values = [0.5] * 10_000
    values[7777] = 9.0
    x, y = curve(range(10_000), values)
    assert len(x) <= 1000 and y[x.index(7777)] == 9


@pytest.mark.parametrize("n", [1, 14, 15, 40, 2500])
def test_running_means_are_of_all_steps(n: int) -> None:
    values = np.random.default_rng(0).normal(size=n).tolist()
    found = running_means(values, points=100)
    expected = pd.Series(values).rolling(found["window"], min_periods=1).mean()
    assert found["values"] == pytest.approx([expected[i] for i in places(values, 100)], rel=1e-5, abs=1e-9)


def test_rises_are_of_totals() -> None:
    rises = Rises()
    rows = [rises.row({"step": s, "ledger/in_flight": v}) for s, v in ((1, 8.0), (2, 6.0), (4, math.nan), (5, 7.0))]
    assert [row.get("page/backlog") for row in rows] == [8, -2, None, 1]


def test_a_grid_of_layers_shows_the_lowest_of_its_steps() -> None:
    rows = [{"step": float(s), f"{LAYER}10": 0.9, f"{LAYER}2": 1.0 if s != 777 else 0.25} for s in range(1000)]
    found = layer_grid(rows, columns(rows))
    assert found is not None and found["y"] == ["2", "10"] and len(found["x"]) == 200
    assert min(found["z"][0]) == 0.25 and found["x"][found["z"][0].index(0.25)] == 775
    assert layer_grid([{"step": 1.0}], []) is None


def test_phases_are_laid_out_before_the_end_of_their_step() -> None:
    """The rollout of the second step overlaps the first one's training, as with staleness."""
    row = {"perf/train_s": 2.0, "perf/publish_s": 1.0}
    rows = [
        {"step": 0.0, "wall_s": 1.0},
        row | {"step": 1.0, "wall_s": 11.0, "perf/rollout_s": 5.0, "perf/step_s": 8.0},
        row | {"step": 2.0, "wall_s": 15.0, "perf/rollout_s": 6.0, "perf/step_s": 4.0},
    ]
    bars = [(b["step"], b["phase"], b["start"], b["seconds"]) for b in gantt(rows)]
    assert bars == [
        (1, "publish", 8, 1),
        (1, "train", 6, 2),
        (1, "rollout", 1, 5),
        (1, "evaluation, checkpoint", 9, 2),
        (2, "publish", 14, 1),
        (2, "train", 12, 2),
        (2, "rollout", 6, 6),
    ]
    assert gantt([{"step": 1.0, "perf/train_s": 1.0}]) == []


def test_numbers_are_short() -> None:
    assert [short(v) for v in (1.0, 0.123456789, 1e20, -3.0)] == [1, 0.123457, 1e20, -3] and type(short(2.0)) is int
