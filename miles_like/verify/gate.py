"""What becomes of a run whose sides differ too much: before its first step, and after each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from rich.console import Console

from miles_like.algorithms.bounds import Bounds
from miles_like.verify.findings import Report

_REMEDY = "`miles-like verify` says what each step explains; mismatch.check_prompts = 0 starts without this check"


def admit(report: Report, console: Console, seconds: float) -> None:
    """Raises ValueError, naming the causes, unless the gap is one that the precision explains."""
    if not report.ok:
        raise ValueError(f"trainer and rollout differ before the first step: {report.sentence()}. {_REMEDY}")
    gap = report.found
    console.print(
        f"{'':12}trainer and rollout agree on {gap.tokens} tokens: kl {gap.kl:.1e}, largest difference "
        f"{gap.largest:.1e} nats, in {seconds:.1f} s"
    )


def judge(
    bounds: Bounds,
    on_breach: Literal["warn", "down_weight", "stop"],
    console: Console,
    step: int,
    metrics: Mapping[str, float],
) -> None:
    """Of a step that was trained and is not published yet: says which bounds it broke. With "stop", RuntimeError."""
    broken = "; ".join(bounds.broken(metrics))
    if not broken:
        return
    if on_breach == "stop":
        raise RuntimeError(
            f"step {step}: {broken}; its weights are not published. rollouts/step_{step}.jsonl has the samples, "
            "`miles-like verify` looks for the cause; --resume goes on from the last checkpoint"
        )
    done = " (those tokens and samples weighed less)" if on_breach == "down_weight" else ""
    console.print(f"{'':12}[yellow]warning:[/] step {step}: {broken}{done}")
