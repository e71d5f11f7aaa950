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
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="run directories; or two checkpoints or files of `eval --answers`"),
    ],
    whole: Annotated[bool, typer.Option("--all", help="every metric, not only the main ones")] = False,
    errors: Annotated[
        float, typer.Option("--errors", min=0.1, help="standard errors from which B is worse, and not within noise")
    ] = 2.0,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="PNG", help="draw the differences of two")] = None,
) -> None:
    """Print the main metrics of several runs side by side; of two, A and B, also whether B is worse on the eval sets of
    both: status 1 then, 0 where the difference is within noise."""
    with one_sentence():
        from miles_like.report.html import read_metrics
        from miles_like.report.paired.table import comparison

        if len(paths) < 2:
            raise ValueError(f"{paths[0]} alone has nothing to be compared with: give two or more run directories")
        runs = {str(path): path for path in paths if (path / "metrics.jsonl").exists() or len(paths) > 2}
        if len(runs) == len(paths):
            found = {name: read_metrics(path / "metrics.jsonl") for name, path in runs.items()}
            console().print(comparison(found, whole=whole))
            echo(f"Configurations: miles-like config diff {paths[0]} {paths[1]}")
        if len(paths) == 2:
            _judge(paths, errors, plot)


def _judge(paths: list[Path], errors: float, plot: Path | None) -> None:
    """Ends with status 1 where the second is worse; raises ValueError where no verdict is possible."""
    from miles_like.report.paired.scores import evaluated
    from miles_like.report.paired.verdict import verdict_table, verdicts

    one, other = map(evaluated, paths)
    found = verdicts(one, other, errors=errors)
    console().print(verdict_table(one, other, found))
    if plot is not None:
        from miles_like.report.paired.plot import write_plot

        write_plot(plot, found)
        echo(f"-> {plot}")
    if worse := [verdict.name for verdict in found if verdict.word == "worse"]:
        echo(f"B is worse than A on {', '.join(worse)}")
        raise typer.Exit(1)
    echo("B is not worse than A: every difference is within noise, or in favour of B")
