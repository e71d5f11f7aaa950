"""Trackio (https://huggingface.co/docs/trackio): metrics in a database of this machine, or in a Hugging Face space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import trackio

from miles_like.config.sections.watched.trackers import TrackersConfig
from miles_like.report.trackers.client import given_up, run_name
from miles_like.report.trackers.run_files import TrackedRun, columns, flat


class TrackioClient:
    """A run of a Trackio project, which knows it by its name: the run's id is at its end, so that two runs in
    directories of one name are two. An offline run is in `trackers/trackio/`, any other in TRACKIO_DIR or a space."""

    def open(self, run: TrackedRun, settings: TrackersConfig, run_id: str) -> str:
        self._run = trackio.init(
            project=settings.project,
            name=f"{run_name(run, settings)}-{run_id}",
            space_id=settings.trackio_space,
            config={key: str(value) for key, value in flat({**run.config, "run": dict(run.about)}).items()},
            resume="allow",
            embed=False,
            auto_log_gpu=False,  # they would be of this process
            auto_log_cpu=False,
        )
        return run_id

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._run.log(dict(metrics), step=step)

    def rolled_back(self, step: int, to: int) -> None:
        self._run.alert(f"went back to step {to}", given_up(step, to), step=step)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = columns(rows)
        values = [list(row) for row in zip(*data.values(), strict=True)]
        self._run.log({"samples": trackio.Table(columns=list(data), data=values)}, step=step)

    def close(self) -> None:
        run: Any = self._run
        run.finish()
