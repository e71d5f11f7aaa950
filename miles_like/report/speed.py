"""Tokens a second and model FLOP utilization of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_like.report.metrics import speed_metrics
from miles_like.types import SampleGroup


@dataclass(frozen=True, slots=True)
class SpeedMeter:
    """`perf/tokens_per_s_...` and, with `peak`, `perf/mfu`.

    flops: (input lengths of the trained samples, labels with loss) -> FLOPs of a training step. peak: FLOP/s of all
    trainer ranks together.
    """

    flops: Callable[[Sequence[int], int], float] | None = None
    peak: float | None = None

    def metrics(
        self, groups: Sequence[SampleGroup], *, train_s: float, rollout_s: float | None = None
    ) -> dict[str, float]:
        """`rollout_s` None: nothing was sampled for the step."""
        return speed_metrics(groups, rollout_s=rollout_s, train_s=train_s, flops=self.flops, peak=self.peak)
