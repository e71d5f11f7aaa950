"""Tracks the best checkpoint by the metric checkpoint.keep_best; the run state stores its step and value."""

from __future__ import annotations

import math
from collections.abc import Mapping

from miles_like.config.sections.watched.metric_direction import better
from miles_like.types import Json


class KeptBest:
    """A metric sink that compares the rows of saved steps. `metric`: checkpoint.keep_best."""

    def __init__(self, metric: str | None) -> None:
        assert metric is None or better(metric), "the configuration was checked"
        self._metric = metric
        self._row: tuple[int, Mapping[str, float]] = (-1, {})
        self._warned = False
        self.step: int | None = None  # of the best checkpoint so far
        self.value: float | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._row = (step, metrics)

    def close(self) -> None:
        pass

    def decide(self, step: int) -> str | None:
        """Make the checkpoint of `step` the best if the last written row is that of `step` and has a better metric.
        Returns a warning, once per process, if there is no such row or it lacks the metric."""
        if self._metric is None:
            return None
        at, row = self._row
        value = row.get(self._metric) if at == step else None
        if value is None or not math.isfinite(value):
            warned, self._warned = self._warned, True
            warning = (
                f"checkpoint.keep_best: the row of step {step} has no {self._metric}, so its checkpoint cannot be "
                "the best: set checkpoint.every to a multiple of eval.every, or choose another metric"
            )
            return None if warned else warning
        if self.value is None or better(self._metric) * (value - self.value) > 0:
            self.step, self.value = step, value
        return None

    def state(self) -> Json:
        return {"metric": self._metric, "step": self.step, "value": self.value}

    def restore(self, state: Json) -> None:
        """Restore a saved `state()`; ignored if `metric` has changed since."""
        assert isinstance(state, Mapping)
        if state["metric"] == self._metric and self._metric is not None:
            step, value = state["step"], state["value"]
            assert step is None or isinstance(step, int)
            assert value is None or isinstance(value, int | float)
            self.step, self.value = step, value
