"""The main metrics of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from miles_like.config.sections.watched.metric_direction import better
from miles_like.report.console import Rows, counted, first_last_best, headline_keys


def comparison(runs: Mapping[str, Rows], *, whole: bool = False) -> Table:
    """A line for each metric, a column for each run: the first and the last value, and the best where a direction is
    better. whole: every metric that one of the runs has measured."""
    table = Table(title="first -> last (best)", title_justify="left")
    table.add_column("metric")
    for name, rows in runs.items():
        table.add_column(escape(f"{name}: {counted(int(rows[-1]['step']), 'step')}"), justify="right")
    for key in compared_keys(list(runs.values()), whole=whole):
        table.add_row(escape(key if key.isprintable() else ascii(key)), *(_cell(rows, key) for rows in runs.values()))
    return table


def compared_keys(runs: Sequence[Rows], *, whole: bool) -> list[str]:
    """In the order of the first run that has them."""
    keys = [key for rows in runs for key in headline_keys(rows)]
    if whole:
        keys += sorted({key for rows in runs for row in rows for key in row} - {"step"})
    return list(dict.fromkeys(keys))


def _cell(rows: Rows, key: str) -> str:
    if (found := first_last_best(rows, key)) is None:
        return ""
    first, last, best = (None if value is None else f"{value:.4g}" for value in found)
    return f"{first} -> {last}" + (f" ({best})" if better(key) else "")
