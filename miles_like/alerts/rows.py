"""Rows of metrics.jsonl as alerts read them.

A run that goes back to an earlier checkpoint (docs/alerts.md#going-back) goes on counting steps, and its file keeps the
rows of the steps that it has given up. The row of the step with which it went back has the key ROLLBACK.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

Row = Mapping[str, float]
Rows = Sequence[Row]

ROLLBACK = "rollback/to"  # the step whose weights the run has again
_MEAN = re.compile(r"eval/([^/]+)/(?:avg@\d+|sampled)")


def kept_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows without those of steps that the run has given up."""
    kept: list[Row] = []
    for row in rows:
        if ROLLBACK in row:
            kept = [one for one in kept if one["step"] <= row[ROLLBACK]]
        kept.append(row)
    return kept


def best_steps(rows: Rows, keys: Iterable[str] | None = None) -> dict[str, int]:
    """Eval set -> the step of its best evaluation, the first of equals. keys: the metrics that are looked at; None:
    those of all rows."""
    found = {key: of[1] for key in (set().union(*rows) if keys is None else keys) if (of := _MEAN.fullmatch(key))}
    best: dict[str, tuple[float, int]] = {}
    for row in rows:
        for key, name in found.items():
            value = row.get(key, math.nan)
            if math.isfinite(value) and value > best.get(name, (-math.inf, 0))[0]:
                best[name] = value, int(row["step"])
    return {name: step for name, (_, step) in best.items()}


def finite(row: Row, key: str) -> float | None:
    """None: the row has no such metric, or one that is no number."""
    value = row.get(key)
    return value if value is not None and math.isfinite(value) else None


def values(rows: Iterable[Row], key: str) -> Iterator[float]:
    """Of the rows that have it."""
    return (value for row in rows if (value := finite(row, key)) is not None)


def last(rows: Rows, key: str, n: int) -> list[float]:
    """The last n values, the latest first; fewer where there are fewer."""
    return list(islice(values(reversed(rows), key), n))


def mean_of_last(rows: Rows, key: str, n: int) -> float | None:
    """None where there are fewer than n, or the last row has none."""
    if finite(rows[-1], key) is None:  # and no search through all rows of a run
        return None
    found = last(rows, key, n)
    return statistics.fmean(found) if len(found) == n else None
