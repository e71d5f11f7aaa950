"""What a training run has left, for Python."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles_like.api.calls import from_python

if TYPE_CHECKING:
    import pandas

LARGEST = 1 << 30  # bytes of a file that is read


@dataclass(frozen=True)
class RunResult:
    """The files of a run directory, read when they are asked for: of a run that `train` has ended, or of any other,
    `RunResult("runs/demo")`. A property or method raises `UserError` for a file that is absent or damaged."""

    run_dir: Path

    def __init__(self, run_dir: str | Path) -> None:
        object.__setattr__(self, "run_dir", Path(run_dir))

    @property
    def rows(self) -> list[dict[str, float]]:
        """The metrics of each step, in order, beginning with step 0: the evaluation before training. A value that was
        not finite is nan. docs/metrics.md defines the keys."""
        rows = _json_lines(self.run_dir / "metrics.jsonl")
        return [{key: math.nan if value is None else value for key, value in row.items()} for row in rows]

    @property
    def metrics(self) -> pandas.DataFrame | list[dict[str, float]]:
        """`rows` as a DataFrame whose index is the step, a column for each metric; without pandas `rows` itself."""
        try:
            from pandas import DataFrame
        except ImportError:
            return self.rows
        return DataFrame(self.rows).set_index("step")

    @property
    def summary(self) -> dict[str, dict[str, float]]:
        """The table that a run prints at its end: metric -> its `first`, `last` and, where a direction is better,
        `best` value."""
        from miles_like.report.console import first_last_best, headline_keys

        rows = self.rows
        found = {key: first_last_best(rows, key) for key in headline_keys(rows)}
        return {
            key: dict(zip(("first", "last", "best"), (v for v in values if v is not None), strict=False))
            for key, values in found.items()
            if values is not None
        }

    @property
    def checkpoint(self) -> Path | None:
        """The folder of the last complete checkpoint; None without one. `miles_like.export` makes a Hugging Face
        directory of it."""
        latest = self.run_dir / "checkpoints" / "latest"
        return latest.parent / latest.read_text(encoding="utf-8").strip() if latest.is_file() else None

    def samples(self, step: int) -> list[dict[str, Any]]:
        """The samples that `step` was trained on, a dict each: `prompt`, `response`, `answer`, `reward`,
        `reward_parts`, `finish`, `tokens`, token ids and log-probabilities."""
        return _samples(self.run_dir / "rollouts" / f"step_{step}.jsonl")

    @property
    def report(self) -> Path:
        """The report as one HTML page."""
        return self.run_dir / "report.html"


@from_python
def _samples(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        steps = sorted(int(found.stem.removeprefix("step_")) for found in path.parent.glob("step_*.jsonl"))
        there = f"available are steps {steps[0]} to {steps[-1]}" if steps else "the run has not written any"
        raise ValueError(f"{path} does not exist: {there}")
    return _json_lines(path)


@from_python
def _json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, one a line."""
    from miles_like.limits.regular_files import json_lines, read_text

    rows = [json.loads(line) for line in json_lines(read_text(path, LARGEST)) if line.strip()]
    if not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"{path} has a line that is not a JSON object: the file is damaged or was edited")
    return rows
