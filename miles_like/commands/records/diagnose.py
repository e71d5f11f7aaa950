"""`miles-like diagnose` and `track`: commands that read what a run has recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.output import console, echo


def diagnose(
    run_dir: Path,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="KEY", help="the whole life of a sample, PROMPT_ID/INDEX, instead"),
    ] = None,
) -> None:
    """Print what bounds the step of a run, in order of seconds, with the keys that change it."""
    with one_sentence():
        from miles_like.diagnosis.describe import sample_lines, step_lines

        for line in step_lines(run_dir) if sample is None else sample_lines(run_dir, sample):
            echo(line)


def track(
    run_dir: Path,
    limit: Annotated[float, typer.Option("--limit", min=0, help="seconds for the trackers to finish")] = 600.0,
) -> None:
    """Send to a run's trackers the rows that they do not have yet."""
    with one_sentence():
        from miles_like.config.load import load_config
        from miles_like.report.trackers.beside import Trackers

        settings = load_config(run_dir / "config.toml").trackers
        if not settings.use:
            raise ValueError(f"{run_dir} was run without trackers: set trackers.use, and continue it with --resume")
        left: list[str] = []
        trackers = Trackers(settings.model_copy(update={"exit_s": limit}), run_dir, left.append)
        trackers.start()
        trackers.end()
        for line in left:
            console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
        if left:
            raise typer.Exit(1)
        echo(f"{', '.join(settings.use)}: every row of {run_dir} is there")
