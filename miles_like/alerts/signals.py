"""The reading of each alert: one number computed from the rows so far, of which more is worse.

Each function gets the rows of metrics.jsonl up to a step, ascending, and returns the reading of the last one; None
where the rows do not have it yet, or the last row lacks the metric. docs/alerts.md says what each means.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from miles_like.alerts.rows import Rows, best_steps, finite, last, mean_of_last, values
from miles_like.config.sections.watched.alerts import (
    AlertRule,
    DeadGroups,
    EntropyCollapse,
    EvalRegression,
    KlSpike,
    LengthDrift,
    PolicyLag,
    RewardHacking,
    RewardLatency,
    Stall,
)

KLS = ("train/kl_ref", "train/kl_old", "mismatch/kl")
PHASES = ("rollout", "experience", "train", "publish", "checks")  # perf/{phase}_s
_LEAST = 3  # earlier values with which one is compared


def kl_spike(rows: Rows, c: KlSpike) -> float | None:
    """Over the largest value: a KL to the reference that grows from 0 is a hundred times its median without a spike."""
    found = [ratio for key in KLS if (ratio := _over(max, rows, key, c.window, c.floor)) is not None]
    return max(found, default=None)


def entropy_collapse(rows: Rows, c: EntropyCollapse) -> float | None:
    key = "train/entropy"
    now = mean_of_last(rows, key, c.window)
    if now is None or len(first := list(islice(values(rows, key), 2 * c.window))) < 2 * c.window:
        return None
    before = statistics.fmean(first[: c.window])
    return max(0.0, 1 - now / before) if before > 0 else None


def reward_hacking(rows: Rows, c: RewardHacking) -> float | None:
    """The regression of a set counts where the mean reward of the last steps is above that of the steps up to the
    set's best evaluation."""
    fallen = regressions(rows)
    if not fallen:
        return None
    best, reading = best_steps(rows, rows[-1]), 0.0
    now, std = last(rows, "rollout/reward/mean", c.window), last(rows, "rollout/reward/std", c.window)
    for name, errors in fallen.items():
        until = [row for row in rows if row["step"] <= best.get(name, 0)]
        after = [row for row in rows if row["step"] > best.get(name, 0)]
        # a first evaluation has no step before it: the first steps after it are as near
        first = islice(values(after, "rollout/reward/mean"), c.window)
        then = last(until, "rollout/reward/mean", c.window) or list(first)
        if now and std and then and statistics.fmean(now) - statistics.fmean(then) >= c.rise * statistics.fmean(std):
            reading = max(reading, errors)
    return reading


def reward_latency(rows: Rows, c: RewardLatency) -> float | None:
    return mean_of_last(rows, "perf/reward/p99_s", c.window)


def policy_lag(rows: Rows, c: PolicyLag) -> float | None:
    return mean_of_last(rows, "async/staleness/mean", c.window)


def dead_groups(rows: Rows, c: DeadGroups) -> float | None:
    key = "rollout/zero_std_group_frac"
    if finite(rows[-1], key) is None:
        return None
    of = list(islice((row for row in reversed(rows) if finite(row, key) is not None), c.window))
    alive = [(1 - row[key]) * (1 - (finite(row, "rollout/filtered_frac") or 0.0)) for row in of]
    return 1 - statistics.fmean(alive) if len(alive) == c.window else None


def length_drift(rows: Rows, c: LengthDrift) -> float | None:
    key = "rollout/len/mean"
    if (now := mean_of_last(rows, key, c.window)) is None:
        return None
    earlier = last(rows, key, c.window + c.before)[c.window :]
    if len(earlier) < _LEAST:
        return None
    before = statistics.median(earlier)
    return max(now / before, before / now) if now > 0 and before > 0 else None


def stall(rows: Rows, c: Stall) -> float | None:
    found = [_over(statistics.median, rows, f"perf/{phase}_s", c.window, c.floor_s) for phase in PHASES]
    return max((ratio for ratio in found if ratio is not None), default=None)


def stalled_phase(rows: Rows, phase: str, seconds: float, c: Stall) -> float | None:
    """The reading of a phase that goes on for `seconds` already. rows: of the steps before it."""
    earlier = last(rows, f"perf/{phase}_s", c.window)
    return seconds / max(statistics.median(earlier), c.floor_s) if len(earlier) >= _LEAST else None


def eval_regression(rows: Rows, c: EvalRegression) -> float | None:
    """Of a set, the least of its last evaluations; of all sets, the largest."""
    found = [last(rows, f"eval/{name}/regression", c.window) for name in regressions(rows)]
    return max((min(errors) for errors in found if len(errors) == c.window), default=None)


def regressions(rows: Rows) -> dict[str, float]:
    """Eval set -> its regression in the last row."""
    found = {key.split("/")[1]: finite(rows[-1], key) for key in rows[-1] if key.endswith("/regression")}
    return {name: errors for name, errors in found.items() if errors is not None}


def _over(usual: Callable[[list[float]], float], rows: Rows, key: str, window: int, floor: float) -> float | None:
    """The size of the last row's value over what is usual of up to `window` values before it."""
    if finite(rows[-1], key) is None:
        return None
    now, *earlier = map(abs, last(rows, key, window + 1))
    return now / max(usual(earlier), floor) if len(earlier) >= _LEAST else None


SIGNALS: Mapping[type[AlertRule], Callable[[Rows, Any], float | None]] = {
    KlSpike: kl_spike,
    EntropyCollapse: entropy_collapse,
    RewardHacking: reward_hacking,
    RewardLatency: reward_latency,
    PolicyLag: policy_lag,
    DeadGroups: dead_groups,
    LengthDrift: length_drift,
    Stall: stall,
    EvalRegression: eval_regression,
}
