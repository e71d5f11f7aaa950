"""A run that is being written, followed by what is new in its files."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import check_inside, open_regular
from miles_like.page.curves import Rises, gantt
from miles_like.page.events import INCIDENTS, RunAlerts, incidents
from miles_like.page.run_data import Figures, config_text, row_figures, run_data, sample_data, warning_texts
from miles_like.page.samples import chosen_files
from miles_like.report.rows import metric_row

SENT_ROWS = 1000  # in one reply; a page that lacks more gets the whole data


class LiveRun:
    """Rows of `metrics.jsonl` as they are appended. Methods may be called from several threads.

    `generation` rises where the run has gone back to an earlier step, as a resumed one: what a page has of it is then
    wrong. Raises ValueError for a directory that does not exist, and in every method for a damaged file.
    """

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise ValueError(f"{run_dir} is not a directory: pass the directory of a run")
        self.run_dir, self.path = run_dir, run_dir / "metrics.jsonl"
        self.generation = 0
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.figures, self._rises = Figures(), Rises()
        self._derived: list[dict[str, float]] = []
        self.alerts = RunAlerts(config_text(self.run_dir))
        self._inode, self._read, self._lines = 0, 0, 0

    def refresh(self) -> bool:
        """Reads what was appended since the last call; whether there is any row."""
        with self._lock:
            return self._refresh()

    def _refresh(self) -> bool:
        if not self.path.exists():
            return False
        check_inside(self.path, self.run_dir)
        with os.fdopen(open_regular(self.path), "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read:
                self.generation += bool(self.rows)
                self._forget()
                self._inode = status.st_ino
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]  # the last line may be half-written
        for line in whole.split(b"\n")[:-1]:
            self._lines += 1
            self._add(metric_row(line, f"{self.path} line {self._lines}"))
        self._read += len(whole)
        return bool(self.rows)

    def _add(self, row: dict[str, float]) -> None:
        if self.rows and row["step"] <= self.rows[-1]["step"]:
            self.generation += 1
            merged = {r["step"]: r for r in self.rows}
            merged.setdefault(row["step"], {}).update(row)
            rows = [merged[step] for step in sorted(merged)]
            self.rows, self._derived, self.figures, self._rises = [], [], Figures(), Rises()
            self.alerts = RunAlerts(config_text(self.run_dir))
            for one in rows:
                self._append(one)
        else:
            self._append(row)

    def _append(self, row: dict[str, float]) -> None:
        self.rows.append(row)
        self._derived.append(self._rises.row(row))
        self.figures.add(row)
        self.alerts.read(row)

    def age_s(self) -> float:
        """Seconds since the metrics were last written."""
        try:
            return max(0.0, time.time() - self.path.stat().st_mtime)
        except OSError:
            return math.inf

    def data(self) -> dict[str, Any]:
        """`run`, as `run_data`; call `refresh` before, which must have found a row."""
        with self._lock:
            return {"run": run_data(self.run_dir, self.rows, self.alerts), "generation": self.generation}

    def samples(self) -> list[Mapping[str, Any]]:
        """Of this run alone, in the form of a page of several."""
        return [sample_data(self.run_dir)]

    def settings(self, poll_s: float) -> dict[str, Any]:
        """What a served page begins with: how often it asks, and what it has."""
        return {
            "poll_s": poll_s,
            "generation": self.generation,
            "samples": self._samples_step(),
            "events": self._events(),
        }

    def since(self, step: float, generation: int, events: str) -> dict[str, Any]:
        """`rows` after `step` and, where there are any or an incident is new, the `parts` of `run_data` that
        change with them. `renew`: the page asks for the whole data instead. `samples`: the last step with samples."""
        with self._lock:
            self._refresh()
            out: dict[str, Any] = {"rows": [], "renew": False}
            out |= {"samples": self._samples_step(), "events": self._events()}
            first = len(self.rows)
            while first and self.rows[first - 1]["step"] > step and len(self.rows) - first <= SENT_ROWS:
                first -= 1
            if generation != self.generation or len(self.rows) - first > SENT_ROWS:
                return out | {"renew": True}
            out["rows"] = [row_figures(row) for row in self._derived[first:]]
            if out["rows"] or events != out["events"]:
                out["parts"] = {
                    "figures": self.figures.table(),
                    "gantt": gantt(self.rows),
                    "warnings": warning_texts(self.rows, self.alerts),
                    "alerts": self.alerts.table(),
                    "incidents": incidents(self.run_dir),
                }
            return out

    def _samples_step(self) -> int:
        files = chosen_files(self.run_dir / "rollouts")
        return files[-1][0] if files else 0

    def _events(self) -> str:
        """Changes with incidents."""
        try:
            status = (self.run_dir / INCIDENTS).stat()
        except OSError:
            return ""
        return str(status.st_mtime_ns)
