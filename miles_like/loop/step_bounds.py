"""Bounds on the metrics of a step, checked before its weights are published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console

from miles_like.algorithms.terms.bounds import Bounds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """Checks steps against `bounds`. on_breach: mismatch.on_breach, the action for a step that exceeds a bound."""

    bounds: Bounds | None = None  # None: every step passes
    on_breach: Literal["warn", "down_weight", "stop"] = "warn"
    console: Console = field(default_factory=Console)

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """metrics: those of the step that ends with weight version `step`, trained but not published. If a bound is
        exceeded, raises RuntimeError with on_breach "stop", and prints a warning naming the bounds otherwise."""
        broken = "" if self.bounds is None else "; ".join(self.bounds.broken(metrics))
        if not broken:
            return
        if self.on_breach == "stop":
            raise RuntimeError(
                f"step {step}: {broken}; its weights are not published. the samples are in "
                f"rollouts/step_{step}.jsonl; `miles-like verify` diagnoses the cause, and --resume continues "
                "from the latest checkpoint"
            )
        done = " (their loss weights were reduced)" if self.on_breach == "down_weight" else ""
        self.console.print(f"{'':12}[yellow]warning:[/] step {step}: {broken}{done}", highlight=False, soft_wrap=True)
