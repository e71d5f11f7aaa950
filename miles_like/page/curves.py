"""Curves of a run's metrics for a page, of at most POINTS points each, whatever the number of steps.

A bucket of steps keeps its lowest and its highest value at the steps at which they were measured, so a spike of one
step stays visible in a run of 10,000.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Rows = Sequence[Mapping[str, float]]

POINTS = 1000
GRID_STEPS = 200  # columns of a grid
GANTT_STEPS = 12
MEAN_SHARE = 15
LAYER = "routing/expert_agreement/"
# derived metric -> the total since the run began of which it is the rise from row to row
RISES = {
    "page/backlog": "ledger/in_flight",
    "page/trained": "ledger/trained",
    "page/discarded": "ledger/discarded",
    "page/train_tokens": "tokens_total",
}
PHASES = ("rollout", "experience", "train", "publish", "checks")  # perf/{phase}_s, in the order of a step


class Rises:
    """Adds the metrics of RISES to rows, which come in ascending order."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def row(self, row: Mapping[str, float]) -> dict[str, float]:
        """The row with its derived metrics; those of a run's first row are the totals themselves."""
        out = dict(row)
        for name, total in RISES.items():
            if math.isfinite(now := row.get(total, math.nan)):
                out[name] = now - self._last.get(total, 0.0)
                self._last[total] = now
        return out


def columns(rows: Rows) -> dict[str, tuple[list[float], list[float]]]:
    """Metric -> (steps, values), both of one length, of all finite values; `rows` ascend in `step`."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in rows:
        step = row["step"]
        for key, value in row.items():
            if key != "step" and math.isfinite(value):
                steps, values = found.setdefault(key, ([], []))
                steps.append(step)
                values.append(value)
    return found


def places(values: Sequence[float], points: int = POINTS) -> list[int]:
    """Ascending places of at most `points` of the values: of each of points / 2 buckets its lowest and its highest."""
    n = len(values)
    if n <= points:
        return list(range(n))
    size = math.ceil(n / (points // 2))
    buckets = math.ceil(n / size)
    extremes = []
    for fill, find in ((math.inf, np.argmin), (-math.inf, np.argmax)):
        padded = np.full(buckets * size, fill)
        padded[:n] = values
        extremes.append(find(padded.reshape(buckets, size), axis=1) + np.arange(buckets) * size)
    return [int(i) for i in np.unique(np.concatenate(extremes))]


def curve(steps: Sequence[float], values: Sequence[float], points: int = POINTS) -> list[list[float]]:
    """[steps, values] of `places`; values have six significant digits."""
    chosen = places(values, points)
    return [[_whole(steps[i]) for i in chosen], [short(values[i]) for i in chosen]]


def running_means(values: Sequence[float], points: int = POINTS) -> dict[str, Any]:
    """`values`: at each of `places` the mean over the last `window` steps, fewer at the start; `window`: a fifteenth of
    all. Of extremes alone a mean would be the middle of the noise."""
    window = max(1, len(values) // MEAN_SHARE)
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(values, dtype=np.float64))])
    ends = np.asarray(places(values, points)) + 1
    begins = np.maximum(0, ends - window)
    return {"window": window, "values": [short(v) for v in (sums[ends] - sums[begins]) / (ends - begins)]}


def short(value: float) -> float:
    """Six significant digits, as an int where it is one: the shortest JSON."""
    return _whole(float(f"{value:.6g}"))


def _whole(value: float) -> float:
    return int(value) if value == int(value) and abs(value) < 1e15 else value


def layer_grid(rows: Rows, keys: Iterable[str]) -> dict[str, list[Any]] | None:
    """Agreement of routes: layers x at most GRID_STEPS buckets of steps, each cell the lowest of its steps. `keys`: all
    metrics of the rows. None where there is no layer's."""
    layers = sorted((key for key in keys if key.startswith(LAYER)), key=_layer)
    kept = [row for row in rows if any(key in row for key in layers)]
    if not kept:
        return None
    size = math.ceil(len(kept) / GRID_STEPS)
    parts = [kept[i : i + size] for i in range(0, len(kept), size)]
    cells = [[_lowest(part, layer) for part in parts] for layer in layers]
    return {"x": [_whole(p[0]["step"]) for p in parts], "y": [k.removeprefix(LAYER) for k in layers], "z": cells}


def _layer(key: str) -> tuple[int, str]:
    name = key.removeprefix(LAYER)
    return (int(name) if name.isdecimal() and len(name) < 10 else 1 << 40), name


def _lowest(rows: Rows, key: str) -> float | None:
    values = [row[key] for row in rows if math.isfinite(row.get(key, math.nan))]
    return short(min(values)) if values else None


def gantt(rows: Rows) -> list[dict[str, float | str]]:
    """Bars of the phases of the last steps: `step`, `phase`, `start` and `seconds` since the run began.

    Rows have the seconds of a phase, not when it began. A step begins where the row before was written, and its phases
    after the rollout follow one another until it ends; the rollout ends where they begin, and may begin before its
    step, since sampling with staleness does.
    """
    bars: list[dict[str, float | str]] = []
    last = [row for row in rows if math.isfinite(row.get("wall_s", math.nan))][-GANTT_STEPS - 1 :]
    for before, row in itertools.pairwise([{"wall_s": 0.0}, *last] if len(last) <= GANTT_STEPS else last):
        seconds = {p: s for p in PHASES if math.isfinite(s := row.get(f"perf/{p}_s", math.nan)) and s > 0}
        if not seconds:
            continue
        end = min(row["wall_s"], before["wall_s"] + row.get("perf/step_s", math.inf))
        for phase in reversed(seconds):
            start = end - seconds[phase]
            bars.append(
                {"step": _whole(row["step"]), "phase": phase, "start": short(start), "seconds": short(seconds[phase])}
            )
            end = start
        rest = row["wall_s"] - before["wall_s"] - row.get("perf/step_s", math.inf)
        if rest > 0.01:
            begin = row["wall_s"] - rest
            phase = "evaluation, checkpoint"
            bars.append({"step": _whole(row["step"]), "phase": phase, "start": short(begin), "seconds": short(rest)})
    return bars
