"""What a tracker's process reads of a run directory while the run writes it."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import MIB, check_inside, open_regular, parse_json, read_own
from miles_like.report.provenance import starts

METRICS = "metrics.jsonl"
_CONFIG_BYTES = 16 * MIB
_TEXT = 4000  # characters of a prompt or response in a table
COLUMNS = ("prompt_id", "index", "prompt", "response", "answer", "reward", "reward_parts", "finish", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """What is attached to a run in a tracker."""

    directory: Path
    config: Mapping[str, Any]  # the resolved configuration
    about: Mapping[str, Any]  # commit, versions, host and date of the start
    began: float  # of the first start, in seconds as `time.time` counts


def tracked_run(run_dir: Path) -> TrackedRun:
    """Raises ValueError for files that are not those of a run, OSError where there are none."""
    config = tomllib.loads(read_own(run_dir / "config.toml", run_dir, _CONFIG_BYTES).decode("utf-8"))
    known = starts(run_dir)
    about = {key: known[-1].get(key) for key in ("commit", "versions", "host", "started")} if known else {}
    first = str(known[0].get("started")) if known else ""
    try:
        began = datetime.fromisoformat(first).timestamp()
    except ValueError:
        began = 0.0
    return TrackedRun(directory=run_dir, config=config, about=about, began=began)


class Rows:
    """The rows of a file that grows, and that a resumed run replaces by a shorter one."""

    def __init__(self, run_dir: Path) -> None:
        self._path, self._run_dir = run_dir / METRICS, run_dir
        self._inode, self._offset = -1, 0

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, metrics without those that are null) of each complete row that was not passed yet. A row counts as
        passed when the next one is asked for, so a row at which the caller stops comes again."""
        if not self._path.exists():
            return
        check_inside(self._path, self._run_dir)
        with os.fdopen(open_regular(self._path), "rb") as file:
            stat = os.fstat(file.fileno())
            if stat.st_ino != self._inode or stat.st_size < self._offset:
                self._inode, self._offset = stat.st_ino, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # of which more is to come
                row = parse_json(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    step = int(row.pop("step"))
                    yield step, {k: float(v) for k, v in row.items() if isinstance(v, int | float)}
                self._offset += len(line)


def unsent(run_dir: Path, step: int) -> tuple[int, int]:
    """(rows after `step`, all rows) of a run."""
    steps = [s for s, _ in Rows(run_dir).new()]
    return sum(s > step for s in steps), len(steps)


def samples_of(run_dir: Path, step: int, rows: int) -> list[dict[str, Any]]:
    """Up to `rows` samples of a step, half of them of the lowest rewards and half of the highest, without token ids.
    Empty where there is no file of them."""
    path = run_dir / "rollouts" / f"step_{step}.jsonl"
    if not path.exists():
        return []
    check_inside(path, run_dir)
    found: list[dict[str, Any]] = []
    with os.fdopen(open_regular(path), "rb") as file:
        for line in file:
            if isinstance(sample := parse_json(line), dict):
                found.append({"step": step, **{key: _shown(sample.get(key)) for key in COLUMNS}})
    found.sort(key=_reward)
    half = rows // 2
    return found if len(found) <= rows else [*found[: rows - half], *found[len(found) - half :]]


def samples_age(run_dir: Path, step: int, now: float) -> float | None:
    """Seconds since the file of a step's samples was last written; None: it is not there."""
    try:
        return now - (run_dir / "rollouts" / f"step_{step}.jsonl").stat().st_mtime
    except FileNotFoundError:
        return None


def _reward(sample: Mapping[str, Any]) -> float:
    value = sample["reward"]
    return float(value) if isinstance(value, int | float) else float("-inf")


def _shown(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _TEXT:
        return f"{value[:_TEXT]}... ({len(value)} characters)"
    return value


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Column -> its values, as tables of trackers take them: numbers, and texts for all else."""
    names = ("step", *COLUMNS)
    return {n: [v if isinstance(v := row[n], int | float | str) else str(v) for row in rows] for n in names}
