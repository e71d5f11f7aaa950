"""Which checkpoint is the best one: checkpoint.keep_best names the metric, the run state keeps step and value."""

from __future__ import annotations

import math
from collections.abc import Mapping

from miles_like.metric_direction import better
from miles_like.types import Json


class KeptBest:
    """A sink of the run's rows that compares those of steps that are saved."""

    def __init__(self, metric: str | None) -> None:
        """metric: checkpoint.keep_best."""
        assert metric is None or better(metric), "the configuration was checked"
        self._metric = metric
        self._row: tuple[int, Mapping[str, float]] = (-1, {})
        self._told = False
        self.step: int | None = None  # of the best one so far
        self.value: float | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._row = (step, metrics)

    def close(self) -> None:
        pass

    def decide(self, step: int) -> str | None:
        """Whether the checkpoint of `step`, whose row was the last, is the best. A sentence, once, when its row has no
        such metric."""
        if self._metric is None:
            return None
        at, row = self._row
        value = row.get(self._metric) if at == step else None
        if value is None or not math.isfinite(value):
            told, self._told = self._told, True
            said = (
                f"checkpoint.keep_best: the row of step {step} has no {self._metric}, so its checkpoint cannot be the "
                "best: let checkpoint.every be a multiple of eval.every, or name another metric"
            )
            return None if told else said
        if self.value is None or better(self._metric) * (value - self.value) > 0:
            self.step, self.value = step, value
        return None

    def state(self) -> Json:
        return {"metric": self._metric, "step": self.step, "value": self.value}

    def restore(self, state: Json) -> None:
        """As it was, unless another metric decides now."""
        assert isinstance(state, Mapping)
        if state["metric"] == self._metric and self._metric is not None:
            step, value = state["step"], state["value"]
            assert step is None or isinstance(step, int)
            assert value is None or isinstance(value, int | float)
            self.step, self.value = step, value
