"""A step's time as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from miles_like.timing.rates.calibration import REACHED
from miles_like.timing.step import StepSetup, StepTime

_SHOWN = 4  # terms of a phase
_BESIDE = {
    "none": "phases follow each other",
    "beside": "sampling runs beside training on other devices: the longer of the two counts",
    "partial": "sides take turns, unfinished samples continue in the next one",
}


def print_step(console: Console, time: StepTime, setup: StepSetup) -> None:
    """Print seconds by phase with the longest terms, then the rates that follow from them and the assumptions."""
    table = Table(title="Predicted step time in seconds, by phase", title_justify="left", box=box.SIMPLE)
    for name in ("phase", "s", "share", "limited by", "terms"):
        table.add_column(name, justify="right" if name in ("s", "share") else "left")
    for name, phase in time.phases.items():
        if phase.seconds:
            terms = sorted(phase.terms.items(), key=lambda item: -item[1])
            listed = ", ".join(f"{term} {_s(seconds)}" for term, seconds in terms[:_SHOWN] if seconds > 0)
            share = f"{phase.seconds / time.seconds:.0%}"
            table.add_row(name, _s(phase.seconds), share, phase.decides, listed)
    console.print(table)
    for line in lines_of(time, setup):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def lines_of(time: StepTime, setup: StepSetup) -> Iterator[str]:
    """The total and its rates, and what is assumed."""
    yield (
        f"step: {_s(time.seconds)} s, limited by {time.decides}; {time.tokens_per_s:,.0f} tokens/s, "
        f"{time.tokens_per_s_per_gpu:,.1f} per GPU, {time.train_mfu:.1%} of the peak while training"
    )
    load, engine = setup.load, setup.publish.engine
    yield (
        f"assumed: {load.samples:,} samples, prompts of {load.prompt:,.0f} and responses of {load.responses.mean:,.0f} "
        f"tokens on average, {load.responses.longest:,.0f} at most (--prompt, --response); {_BESIDE[time.overlap]}; "
        f"{engine.device.name}s reach {REACHED[engine.device.name]:.0%} of the formulas' speed (docs/plan.md)"
    )


def _s(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
