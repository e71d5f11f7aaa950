"""The check that stops a run before its first step where trainer and rollout differ too much."""

from __future__ import annotations

from rich.console import Console

from miles_like.alignment.report import Report

_REMEDY = "`miles-like verify` diagnoses the difference step by step; mismatch.check_prompts = 0 skips this check"


def check_before_start(report: Report, console: Console, seconds: float) -> None:
    """Print the gap. Raises ValueError, naming the causes, unless the precision explains it.

    seconds: how long the comparison took."""
    if not report.ok:
        raise ValueError(f"trainer and rollout differ before the first step: {report.sentence()}. {_REMEDY}")
    gap = report.initial_gap
    console.print(
        f"{'':12}Log-probability check passed: KL {gap.kl:.1e} over {gap.tokens} tokens, max difference "
        f"{gap.largest:.2g} nats ({seconds:.1f} s)",
        highlight=False,
        soft_wrap=True,
    )
