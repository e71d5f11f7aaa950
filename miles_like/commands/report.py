"""`miles-like report`, `watch`, `top` and `compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from miles_like.command_errors import one_sentence
from miles_like.commands.output import console, echo

PORT = 8765  # of `watch`
RunDirs = Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="run directories")]


def report(
    run_dirs: RunDirs,
    whole: Annotated[bool, typer.Option("--all", help="print all metrics, not only the ten main ones")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="the page; default: RUN_DIR/report.html, of several runs runs.html"),
    ] = None,
) -> None:
    """Write the page of a run, or of several beside each other, and print the main metrics."""
    with one_sentence():
        from miles_like.page.write import REPORT, write_page
        from miles_like.report.console import summary_table
        from miles_like.report.paired.table import comparison
        from miles_like.report.rows import read_metrics

        several = len(run_dirs) > 1
        path = write_page(run_dirs, out or (Path("runs.html") if several else run_dirs[0] / REPORT))
        rows = {str(run_dir): read_metrics(run_dir / "metrics.jsonl") for run_dir in run_dirs}
        if several:
            console().print(comparison(rows, whole=whole))
        else:
            console().print(summary_table(rows[str(run_dirs[0])], whole=whole))
        echo(f"-> {path}")


def watch(
    run_dir: Path,
    port: Annotated[int, typer.Option("--port", help="0: any free port")] = PORT,
    host: Annotated[
        str, typer.Option("--host", help="address to listen on; on other addresses than loopback the URL has a token")
    ] = "127.0.0.1",
) -> None:
    """Serve the page of a run while it goes on: new steps, samples, alerts and incidents appear by themselves."""
    with one_sentence():
        from miles_like.page.live_run import LiveRun
        from miles_like.page.server import listening, serve, token_for, url_of

        run = LiveRun(run_dir)
        run.refresh()
        with listening(host, port) as listener:
            token = token_for(listener)
            echo(f"ready: {url_of(listener, token)}")
            serve(run, listener, token)


def top(
    run_dir: Path,
    once: Annotated[bool, typer.Option("--once", help="print it once, as where the output is no terminal")] = False,
) -> None:
    """Show a run in this terminal: progress, main figures with their trends, operations, alerts."""
    with one_sentence():
        from miles_like.page.live_run import LiveRun
        from miles_like.page.top import top as show

        show(LiveRun(run_dir), console(), once=once or not console().is_terminal)


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
    """Print the main metrics of several runs side by side, and whether the second of two is worse.

    It is worse by the eval sets of both: the status is 1 then, and 0 where the difference is within noise."""
    with one_sentence():
        from miles_like.report.paired.table import comparison
        from miles_like.report.rows import read_metrics

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
