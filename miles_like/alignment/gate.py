"""The check that stops a run before its first step where trainer and rollout differ too much."""

from __future__ import annotations

from rich.console import Console

from miles_like.alignment.report import Report

_REMEDY = "`miles-like verify` attributes the gap step by step; mismatch.check_prompts = 0 starts without this check"


def check_before_start(report: Report, console: Console, seconds: float) -> None:
    """Print the gap. Raises ValueError, naming the causes, unless the precision explains it.

    seconds: how long the comparison took."""
    if not report.ok:
        raise ValueError(f"trainer and rollout differ before the first step: {report.sentence()}. {_REMEDY}")
    gap = report.initial_gap
    console.print(
        f"{'':12}trainer and rollout agree on {gap.tokens} tokens: kl {gap.kl:.1e}, largest difference "
        f"{gap.largest:.1e} nats, in {seconds:.1f} s"
    )
