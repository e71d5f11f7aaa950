"""`miles-like report`."""

from __future__ import annotations

from pathlib import Path

from miles_like.command_errors import one_sentence
from miles_like.commands.output import echo


def report(run_dir: Path) -> None:
    """Write report.html and the plots of a run directory."""
    with one_sentence():
        from miles_like.report.html import write_report

        write_report(run_dir)
        echo(f"-> {run_dir / 'report.html'}")
