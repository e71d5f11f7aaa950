"""Weights & Biases (https://docs.wandb.ai)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import wandb

from miles_like.config.sections.watched.trackers import TrackersConfig
from miles_like.report.trackers.client import given_up, run_name
from miles_like.report.trackers.run_files import TrackedRun, columns
from miles_like.report.trackers.sent import FOLDER

_TAG = "rolled back"


class WandbClient:
    """A run of W&B. A server is chosen by WANDB_BASE_URL, a team by WANDB_ENTITY, the key by WANDB_API_KEY or
    `wandb login`. Offline runs are in `trackers/wandb/`, for `wandb sync`."""

    def open(self, run: TrackedRun, settings: TrackersConfig, run_id: str) -> str:
        folder = run.directory / FOLDER / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=settings.project,
            name=run_name(run, settings),
            id=run_id,
            resume="allow",
            dir=str(folder),
            config={**run.config, "run": dict(run.about)},
            mode="offline" if settings.offline else "online",
            settings=wandb.Settings(
                console="off",  # it would be this process's, which prints nothing
                disable_git=True,  # the commit of the run is in its configuration
                save_code=False,
                x_disable_stats=True,  # of this process
            ),
        )
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        self._run.log(dict(metrics), step=step)

    def rolled_back(self, step: int, to: int) -> None:
        self._run.config.update({f"rolled_back/{step}": given_up(step, to)}, allow_val_change=True)
        self._run.tags = (*(tag for tag in self._run.tags or () if tag != _TAG), _TAG)

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        data = columns(rows)
        table = wandb.Table(columns=list(data), data=[list(row) for row in zip(*data.values(), strict=True)])
        self._run.log({"samples": table}, step=self._run.step)

    def close(self) -> None:
        self._run.finish()
