"""The warnings of a run, on planted series.

Why it must hold: a run that learns nothing costs as much as one that learns, and a false alarm teaches users to skip
the true ones. Not covered: whether the thresholds fit a task unlike the tiny one.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from miles_like.report.health import CHECKS, FLAT_STEPS, PAGE, Warner, repeated, warnings

Row = dict[str, float]


def series(steps: int, **columns: Callable[[int], float]) -> list[Row]:
    names = {"reward": "rollout/reward/mean", "std": "rollout/reward/std"}
    names |= {"cut": "rollout/truncated_frac", "right": "rollout/accuracy"}
    rows = [{"step": float(i), **{names[k]: of(i) for k, of in columns.items()}} for i in range(1, steps + 1)]
    return [{"step": 0.0, "eval/heldout/avg@1": 0.2}, *rows]


def learning(seed: int, steps: int = 100) -> list[Row]:
    """A run of the tiny task as docs/algorithms.md shows it: reward .18 -> .39 in 25 steps, .46 at 100, with the noise
    of 64 prompts a step."""
    noise = random.Random(seed)
    curve = [(0, 0.18), (25, 0.39), (50, 0.42), (75, 0.44), (100, 0.46)]

    def reward(i: int) -> float:
        (a, x), (b, y) = next((p, q) for p, q in itertools.pairwise(curve) if i <= q[0])
        return x + (y - x) * (i - a) / (b - a) + noise.gauss(0, 0.05)

    return series(
        steps,
        reward=reward,
        std=lambda i: 0.49,
        cut=lambda i: noise.uniform(0, 0.1),
    )


@pytest.mark.parametrize("seed", range(10))
def test_a_run_that_learns_is_not_warned_of(seed: int) -> None:
    rows = learning(seed)
    assert not [warnings(rows[:n]) for n in range(1, len(rows) + 1) if warnings(rows[:n])]


def test_the_demo_is_not_warned_of() -> None:
    """demo_metrics.json: by key the values of steps 1 to 100 of `miles-like demo` on two CPU cores."""
    columns = json.loads(Path(__file__).with_name("demo_metrics.json").read_text())
    rows: list[Row] = [{"step": 0.0}]
    rows += [{"step": i + 1.0, **{k: v[i] for k, v in columns.items()}} for i in range(100)]
    assert not [warnings(rows[:n]) for n in range(1, 102) if warnings(rows[:n])]


def test_samples_that_are_truncated() -> None:
    assert list(warnings(series(5, cut=lambda i: 0.3))) == ["truncated-answers"]
    assert "42%" in warnings(series(9, cut=lambda i: 0.42))["truncated-answers"]
    assert not warnings(series(4, cut=lambda i: 1.0)) and not warnings(series(30, cut=lambda i: 0.29))
    assert not warnings(series(30, cut=lambda i: 0.6 if i % 5 == 0 else 0.1))  # single steps


def test_a_reward_that_stays_where_it_is() -> None:
    def flat(**columns: Callable[[int], float]) -> list[str]:
        return list(warnings(series(FLAT_STEPS, **{"reward": lambda i: 0.3, **columns})))

    noise = random.Random(0)
    assert flat() == flat(reward=lambda i: 0.0) == flat(reward=lambda i: 0.5 - i / 200) == ["flat-reward"]
    assert flat(reward=lambda i: 0.3 + noise.gauss(0, 0.005), std=lambda i: 0.45) == ["flat-reward"]
    assert flat(reward=lambda i: -5.0) == ["flat-reward"]
    assert not flat(reward=lambda i: 0.3 + 0.001 * i, std=lambda i: 0.45)  # slow, but it rises: 11 % of the deviation
    assert not flat(reward=lambda i: 0.3 + noise.gauss(0, 0.1), std=lambda i: 0.45)  # the noise may hide a rise
    assert not flat(reward=lambda i: 0.97) and not flat(right=lambda i: 1.0)  # nothing is left to learn
    assert not warnings(series(FLAT_STEPS - 1, reward=lambda i: 0.3))


def test_a_reward_that_rises_where_held_out_figures_do_not() -> None:
    """200 rows, seen 13 times each: the reward of those prompts went from .27 to .55, held-out .30 to .33."""

    def warned(*held_out: float, rise: float = 0.007) -> list[str]:
        rows = series(40, reward=lambda i: 0.27 + rise * i, std=lambda i: 0.4)
        for i, value in enumerate(held_out):
            rows[i * 40 // (len(held_out) - 1)]["eval/heldout/avg@1"] = value
        return list(warnings(rows))

    assert warned(0.3, 0.32, 0.334) == warned(0.3, 0.3, 0.28) == ["memorized-prompts"]
    assert not warned(0.3, 0.35, 0.40) and not warned(0.3, 0.334), "two evaluations are too few"
    assert not warned(0.3, 0.32, 0.30, rise=0.002), "a small rise may be noise"


def test_a_rise_before_the_first_evaluation_is_not_compared_with_held_out_figures() -> None:
    """A set that is first evaluated after 40 steps, in which the reward rose: it has risen there too, unseen."""
    rows = [*series(40, reward=lambda i: 0.27 + 0.007 * i, std=lambda i: 0.4)[1:]]
    rows += [{"step": 41.0 + i, "rollout/reward/mean": 0.55, "rollout/reward/std": 0.4} for i in range(30)]
    for i in (39, 54, 69):
        rows[i]["eval/late/avg@1"] = 0.5
    assert not warnings(rows)


def test_prompts_that_are_trained_often() -> None:
    (sentence,) = repeated(200, steps=40, groups=64)
    assert "200 prompts are each trained 13 times" in sentence
    assert repeated(2531, steps=100, groups=64) == []


def test_a_value_that_was_not_measured_or_is_no_number_is_passed_over() -> None:
    rows = series(60, cut=lambda i: math.nan, reward=lambda i: math.nan)
    assert not warnings(rows) and not warnings([]) and not warnings([{"step": 1.0, "train/loss": 2.0}])
    assert list(warnings([*series(5, cut=lambda i: 1.0), {"step": 6.0}])) == ["truncated-answers"]


def test_a_warning_returns_only_after_fifty_steps_without_it() -> None:
    warner, begun = Warner(), []
    rows: list[Row] = []
    for i in range(1, 200):
        rows.append({"step": float(i), "rollout/truncated_frac": float(i < 20 or 30 < i < 40 or i > 150)})
        begun += [i for _ in warner.begun(rows)]
    assert begun == [5, 152]


def test_every_check_has_an_anchor_in_the_page() -> None:
    page = (Path(__file__).parents[3] / PAGE).read_text()
    headings = {line[3:].strip().lower().replace(" ", "-") for line in page.splitlines() if line.startswith("## ")}
    assert len(CHECKS) == 3
    assert [a for a in CHECKS if f'<a id="{a}"></a>' not in page and a not in headings] == []
