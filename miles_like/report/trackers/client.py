"""A tracker as the process beside a run sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miles_like.config.sections.watched.trackers import TrackersConfig
from miles_like.report.trackers.run_files import TrackedRun


class TrackerClient(Protocol):
    """One run in a tracker. Each method may block, and raise any exception of the client's library."""

    def open(self, run: TrackedRun, settings: TrackersConfig, run_id: str) -> str:
        """Begins the run, or goes on with the one of this id; returns the id that the tracker gives it."""

    def log(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """The row of a step. at: when it was written, in seconds as `time.time` counts; the same each time."""

    def rolled_back(self, step: int, to: int) -> None:
        """Marks the rows after step `to`, up to `step`, whose row was logged, as those of steps that were given up. May
        be called again with the same."""

    def table(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Samples of a step."""

    def close(self) -> None:
        """Returns when the tracker has all that it was given."""


def given_up(step: int, to: int) -> str:
    """What a run that went back is marked with."""
    return f"step {step} has the weights of step {to} again: the rows between them are of steps that were given up"


def run_name(run: TrackedRun, settings: TrackersConfig) -> str:
    return settings.name or run.directory.name
