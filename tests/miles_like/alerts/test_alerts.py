"""Alerts as a function of the rows of metrics.jsonl: each fires on its planted fault, and none over healthy runs.

Why it must hold: an alert may end a run of days, and a false one teaches users to skip the true ones. Runs with planted
faults: tests/miles_like/run/watched/test_alerted_runs.py.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.alerts.machine import PAGE, Alerts, State, advance, events
from miles_like.alerts.rows import ROLLBACK, best_steps, kept_rows
from miles_like.alerts.signals import SIGNALS, stalled_phase
from miles_like.config.sections.watched.alerts import AlertRule, AlertsConfig, EvalRegression, Stall
from miles_like.report.rows import read_metrics

ROOT = Path(__file__).parents[3]
HEALTHY = sorted((ROOT / "tests" / "data" / "healthy_runs").glob("*.jsonl"))
Row = dict[str, float]
EVAL = "eval/heldout/avg@1"
DEFAULTS = AlertsConfig()


def series(steps: int, **columns: Callable[[int], float | None]) -> list[Row]:
    """Rows 1 .. steps; `a__b` is the key a/b."""
    found = [
        {"step": float(i), **{k.replace("__", "/"): of(i) for k, of in columns.items()}} for i in range(1, steps + 1)
    ]
    return [{k: v for k, v in row.items() if v is not None} for row in found]


def fired(rows: Sequence[Mapping[str, float]], config: AlertsConfig = DEFAULTS) -> list[tuple[str, int]]:
    return [(e.alert, e.step) for e in events(rows, config) if e.kind == "fired"]


def at(step: int, before: float, after: float) -> Callable[[int], float]:
    return lambda i: after if i >= step else before


PLANTED = {
    "kl_spike": (series(9, train__kl_ref=at(6, 0.011, 0.2)), 6),
    "a mismatch": (series(9, mismatch__kl=at(6, 1e-4, 0.11), train__kl_old=lambda i: -0.001), 6),
    "entropy_collapse": (series(10, train__entropy=at(5, 1.0, 0.05)), 7),
    "reward_latency": (series(6, perf__reward__p99_s=at(3, 1.0, 80.0)), 5),
    "policy_lag": (series(9, async__staleness__mean=lambda i: float(i + 1)), 8),
    "dead_groups": (series(9, rollout__zero_std_group_frac=at(4, 0.2, 1.0)), 6),
    "filtered groups": (
        series(9, rollout__zero_std_group_frac=lambda i: 0.0, rollout__filtered_frac=at(4, 0.1, 0.97)),
        6,
    ),
    "length_drift": (series(9, rollout__len__mean=at(7, 100.0, 300.0)), 9),
    "shorter answers": (series(9, rollout__len__mean=at(7, 300.0, 100.0)), 9),
    "stall": (series(6, perf__rollout_s=lambda i: 20.0, perf__train_s=at(5, 11.0, 120.0)), 5),
    "eval_regression": (series(8, eval__heldout__regression=lambda i: 3.1 if i == 6 else 0.5), 6),
    "reward_hacking": (
        series(
            9,
            rollout__reward__mean=lambda i: 0.1 * i,
            rollout__reward__std=lambda i: 0.4,
            **{
                "eval__heldout__avg@1": lambda i: (0.5 if i == 3 else 0.4) if i % 3 == 0 else None,
                "eval__heldout__regression": lambda i: {3: -1.0, 6: 1.0, 9: 2.5}.get(i),
            },
        ),
        9,
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_an_alert_fires_at_the_step_of_its_planted_fault_within_ten_steps(name: str) -> None:
    rows, step = PLANTED[name]
    wanted = {"a mismatch": "kl_spike", "filtered groups": "dead_groups", "shorter answers": "length_drift"}
    assert len(rows) <= 10 and fired(rows) == [(wanted.get(name, name), step)]


def test_every_alert_has_a_planted_fault() -> None:
    assert {name for name, _ in AlertsConfig().rules()} <= set(PLANTED) and len(SIGNALS) == 9


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_no_alert_fires_over_a_healthy_run(path: Path) -> None:
    """Recorded as tests/data/healthy_runs/README.md says; each alert has readings in one of them."""
    assert fired(read_metrics(path)) == []


def test_a_learning_rate_that_was_planted_is_seen_at_its_first_step_each_time() -> None:
    """Recorded: 30 times the learning rate from step 31 on; the run went back at step 36, and ended at step 41."""
    rows = read_metrics(ROOT / "tests" / "data" / "planted_learning_rate.jsonl")
    assert fired(rows) == [("kl_spike", 31), ("eval_regression", 35), ("kl_spike", 37), ("eval_regression", 40)]
    assert [int(row["step"]) for row in rows if ROLLBACK in row] == [36, 41]


def test_each_alert_has_readings_over_the_healthy_runs() -> None:
    """Silence without a reading would be no silence."""
    assert len(HEALTHY) == 3
    read = set[str]()
    for path in HEALTHY:
        rows: list[Mapping[str, float]] = []
        for row in read_metrics(path):
            rows.append(row)
            read |= {n for n, rule in AlertsConfig().rules() if SIGNALS[type(rule)](rows, rule) is not None}
    assert read == {name for name, _ in AlertsConfig().rules()}


@pytest.mark.parametrize("name", PLANTED)
def test_a_threshold_above_the_fault_and_off_are_silent(name: str) -> None:
    rows, _ = PLANTED[name]
    (alert, _), *_ = fired(rows)
    rule = getattr(AlertsConfig(), alert)
    above = {"entropy_collapse": 0.99, "dead_groups": 1.0}.get(alert, 1000.0)
    given_rows = rows if alert != "dead_groups" else [{**row, "rollout/zero_std_group_frac": 0.97} for row in rows[:5]]
    for update in ({"threshold": above}, {"action": "off"}):
        config = AlertsConfig(**{alert: rule.model_copy(update=update)})
        assert not fired(given_rows, config)


RULE = EvalRegression(threshold=3.0, clear=0.5)


@settings(deadline=None)
@given(st.lists(st.sampled_from((None, 0.0, 1.4, 1.5, 2.9, 3.0, 5.0)), max_size=40))
def test_an_alert_fires_again_only_after_it_was_over(readings: list[float | None]) -> None:
    """Against a machine that is written out: between two firings there is a reading below what ends it."""
    state, kinds = State(), list[str]()
    low = True
    for step, reading in enumerate(readings):
        state, event = advance(state, reading, step, "eval_regression", RULE)
        expected = None
        if reading is not None and reading >= 3.0 and low:
            low, expected = False, "fired"
        elif reading is not None and reading < 1.5 and not low:
            low, expected = True, "over"
        assert (event.kind if event else None) == expected
        kinds += [event.kind] if event else []
        assert state.firing is not low
    assert all(a != b for a, b in itertools.pairwise(kinds))


def test_since_is_the_first_step_of_those_that_lead_to_it() -> None:
    readings = [0.0, 1.6, 2.0, 1.0, 1.7, 2.9, 3.0, 2.0]
    rows = [{"step": float(i), "eval/x/regression": r} for i, r in enumerate(readings)]
    found = events(rows, AlertsConfig(eval_regression=RULE))
    assert [(e.kind, e.step, e.since) for e in found] == [("fired", 6, 4)]
    assert "since step 4" in found[0].sentence and "3 standard errors" in found[0].sentence


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 30), st.integers(0, 10**6))
def test_a_resumed_run_has_the_alerts_of_the_run_that_was_not_killed(cut: int, seed: int) -> None:
    """Its state is computed from the rows before the checkpoint; the events after it are the same."""
    draw = random.Random(seed)
    keys = ("train/kl_ref", "train/entropy", "rollout/len/mean", "rollout/zero_std_group_frac", "perf/train_s")
    rows = [{"step": float(i), **{k: draw.choice((0.01, 1.0, 40.0, math.nan)) for k in keys}} for i in range(30)]
    whole = Alerts(AlertsConfig())
    expected = [event for row in rows for event in whole.read(row)]
    before, resumed = Alerts(AlertsConfig()), Alerts(AlertsConfig())
    first = [event for row in rows[:cut] for event in before.read(row)]
    for row in rows[:cut]:
        resumed.read(row)
    assert first + [event for row in rows[cut:] for event in resumed.read(row)] == expected
    assert resumed.states == whole.states


def test_rows_of_steps_that_were_given_up_are_not_read() -> None:
    """After going back to step 3 the history is that of step 3, and an alert that fired may fire again."""
    rows = series(8, **{"eval__heldout__regression": lambda i: 4.0 if i > 3 else 0.0, "eval__heldout__avg@1": float})
    back: Row = {"step": 9.0, ROLLBACK: 3.0}
    again: Row = {"step": 10.0, "eval/heldout/regression": 4.0}
    assert fired([*rows, back, again]) == [("eval_regression", 4), ("eval_regression", 10)]
    assert [row["step"] for row in kept_rows([*rows, back, again])] == [1, 2, 3, 9, 10]
    assert best_steps(kept_rows([*rows, back, again])) == {"heldout": 3} and best_steps(rows) == {"heldout": 8}


def test_a_row_that_is_written_twice_for_a_step_is_one() -> None:
    rows = [{"step": 4.0, "train/entropy": 1.0}, {"step": 4.0, EVAL: 0.5}]
    alerts = Alerts(AlertsConfig())
    for row in rows:
        alerts.read(row)
    assert alerts.rows == [{"step": 4.0, "train/entropy": 1.0, EVAL: 0.5}]


def test_a_phase_that_does_not_end_has_a_reading_while_it_goes_on() -> None:
    rows, rule = series(5, perf__train_s=lambda i: 30.0), Stall()
    assert stalled_phase(rows, "train", 299.0, rule) == pytest.approx(299 / 30)
    assert stalled_phase(rows, "train", 301.0, rule) > rule.threshold  # type: ignore[operator]
    assert stalled_phase(rows, "publish", 1e6, rule) is None and stalled_phase(rows[:2], "train", 1e6, rule) is None


def test_every_alert_has_its_section_in_the_page() -> None:
    page = (ROOT / PAGE).read_text()
    missing = [n for n, _ in AlertsConfig().rules() if f'<a id="{n.replace("_", "-")}"></a>' not in page]
    assert not missing and all(isinstance(rule, AlertRule) for _, rule in AlertsConfig().rules())
