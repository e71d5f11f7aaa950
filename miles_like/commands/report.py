"""`miles-like report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.output import console, echo


def report(
    run_dir: Path,
    whole: Annotated[bool, typer.Option("--all", help="print all metrics, not only the ten main ones")] = False,
) -> None:
    """Write the report.html and the plots of a run, and print its main metrics."""
    with one_sentence():
        from miles_like.report.console import summary_table
        from miles_like.report.html import read_metrics, write_report

        write_report(run_dir)
        console().print(summary_table(read_metrics(run_dir / "metrics.jsonl"), whole=whole))
        echo(f"-> {run_dir / 'report.html'}")
