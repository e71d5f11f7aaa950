"""`miles-like report` and `compare`."""

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


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="run directories")],
    whole: Annotated[bool, typer.Option("--all", help="every metric, not only the main ones")] = False,
) -> None:
    """Print the main metrics of several runs side by side."""
    with one_sentence():
        from miles_like.report.compare import comparison
        from miles_like.report.html import read_metrics

        if len(run_dirs) < 2:
            raise ValueError(f"{run_dirs[0]} alone has nothing to be compared with: give two or more run directories")
        runs = {str(path): read_metrics(path / "metrics.jsonl") for path in run_dirs}
        console().print(comparison(runs, whole=whole))
        echo(f"Configurations: miles-like config diff {run_dirs[0]} {run_dirs[1]}")
