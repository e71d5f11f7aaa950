"""Rows of metrics.jsonl: one JSON object a step, written and read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from miles_like.limits.regular_files import MIB, parse_json, read_own

NON_FINITE = "nonfinite_count"
METRICS_BYTES = 512 * MIB  # largest file that is read
LARGEST = 1e100  # largest metric: far above any real one, and plots can be scaled to it


def json_row(step: int, metrics: Mapping[str, float]) -> str:
    """JSON has no nan or infinity: such values are null, and `nonfinite_count` is their number."""
    row: dict[str, float | None] = {"step": step}
    row |= {k: v if math.isfinite(v) else None for k, v in metrics.items()}
    bad = sum(v is None for v in row.values())
    if bad:
        row[NON_FINITE] = bad
    return json.dumps(row, allow_nan=False)


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a metrics file, one per step, ascending; null is nan.

    For a step written twice (again after a resume), the later value of each key is used. A last line cut short by a
    kill is ignored. Raises ValueError for a missing or empty file, one that is no regular file of the directory, or a
    line that is no JSON object of numbers with a step.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: pass the directory of a run that has trained")
    try:
        text = read_own(path, path.parent, METRICS_BYTES).decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is damaged: it is not UTF-8 ({e}); remove it") from None
    lines = text.split("\n")
    rows: dict[float, dict[str, float]] = {}
    for number, line in enumerate(lines, 1):
        if number == len(lines) and _is_cut_short(line):
            break
        values = metric_row(line, f"{path} line {number}")
        rows.setdefault(values["step"], {}).update(values)
    if not rows:
        raise ValueError(f"{path} has no step yet: wait for the run's first step, or pass another run directory")
    return [rows[s] for s in sorted(rows)]


def metric_row(line: str | bytes, where: str) -> dict[str, float]:
    """The metrics of a line; null is nan. Raises ValueError that begins with `where`."""
    try:
        row = parse_json(line)
    except ValueError as e:
        raise ValueError(f"{where} is damaged ({e}): remove that line") from e
    if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 1 << 53:
        raise ValueError(f"{where} is not an object with a step: remove that line")
    if wrong := [k for k, v in row.items() if not _is_figure(v)]:
        value = repr(row[wrong[0]])[:40]
        raise ValueError(f"{where}: {wrong[0][:80]} is {value}, expected a number within {LARGEST:g}: remove that line")
    return {k: math.nan if v is None else float(v) for k, v in row.items()}


def _is_cut_short(line: str) -> bool:
    try:
        parse_json(line)
    except ValueError:
        return True
    return False


def _is_figure(value: object) -> bool:
    """Whether `value` is valid for a metric: a number that can be drawn, null, or a number that is not finite (skipped
    in plots)."""
    if value is None or isinstance(value, bool):
        return True
    return isinstance(value, int | float) and (value != value or abs(value) in (math.inf,) or abs(value) <= LARGEST)
