"""A run in a terminal: what `miles-like top` shows."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from miles_like.page.curves import Rises
from miles_like.page.live_run import LiveRun
from miles_like.page.run_data import CONFIG, CONFIG_BYTES, train_setting, warning_texts
from miles_like.page.samples import own_text
from miles_like.report.console import duration, headline_keys, remaining_s

REFRESH_S = 2.0
BAR = 60  # characters of the bar
TREND = 40  # steps of a trend, one a character
RECENT = 20  # steps of a mean
SHOWN_ALERTS = 5
STALLED = 5.0  # times the mean duration of a step, from which the run is late
OPERATIONS = {
    "rollout/tokens": "generated tokens a step",
    "page/train_tokens": "learner tokens a step",
    "page/backlog": "backlog delta",
    "async/staleness/max": "version lag",
    "perf/publish_s": "publish s",
    "perf/rollout_s": "rollout s",
    "perf/train_s": "train s",
    "perf/tokens_per_s_rollout": "rollout tokens/s",
    "perf/tokens_per_s_train": "train tokens/s",
    "perf/queue/ready": "groups ready",
    "perf/memory/device_bytes": "device bytes",
    "rollout/servers_healthy": "servers healthy",
}


def top(run: LiveRun, console: Console, *, once: bool) -> None:
    """Shows the run until the process is interrupted; once: prints it and returns. Raises ValueError as `LiveRun`."""
    steps = _steps(run)
    if once:
        console.print(view(run, steps))
        return
    with Live(view(run, steps), console=console, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(view(run, steps), refresh=True)


def _steps(run: LiveRun) -> int | None:
    path = run.run_dir / CONFIG
    return train_setting(own_text(path, run.run_dir, CONFIG_BYTES), "steps") if path.exists() else None


def view(run: LiveRun, steps: int | None) -> RenderableType:
    name = escape(_shown(run.run_dir.resolve().name))
    if not run.refresh():
        return f"[bold]{name}[/]  no step yet"
    rises = Rises()
    rows = [rises.row(row) for row in run.rows[-TREND - 1 :]][-TREND:]
    main = headline_keys([dict.fromkeys((k for row in rows for k in row), 0.0)])
    parts: list[RenderableType] = [_head(run, name, steps)]
    parts.append(_table([(key, key) for key in main], rows))
    if kept := [(key, text) for key, text in OPERATIONS.items() if any(key in row for row in rows)]:
        parts.append(_table(kept, rows))
    for one in run.alerts.table()[:SHOWN_ALERTS]:
        text = f"step {one['step']}: {one['alert']}: {one['value']}, threshold {one['threshold']}; {one['action']}"
        over = "" if one["over"] is None else f"; over at step {one['over']}"
        parts.append(Text(f"alert    {text}{over}", style="dim" if over else "bold red"))
    parts += [Text(f"warning  {_shown(text)}", style="yellow") for text in warning_texts(run.rows, run.alerts)]
    return Group(*parts)


def _head(run: LiveRun, name: str, steps: int | None) -> RenderableType:
    row, age = run.rows[-1], run.age_s()
    text = f"[bold]{name}[/]  step {int(row['step'])}" + ("" if steps is None else f"/{steps}")
    rest = None if steps is None else remaining_s(run.rows, steps=steps)
    if math.isfinite(wall := row.get("wall_s", math.nan)):
        text += f"  {duration(wall)}" + ("" if rest is None else f"<{duration(rest)}")
    step_s = row.get("perf/step_s", math.nan)
    late = age > max(60.0, STALLED * step_s) and (steps is None or row["step"] < steps)
    text += f"  [{'bold red' if late else 'dim'}]last row {duration(age)} ago[/]"
    if steps is None:
        return Text.from_markup(text)
    done = int(BAR * min(row["step"], steps) / steps)
    return Text.from_markup(f"{text}\n[green]{'━' * done}[/][dim]{'━' * (BAR - done)}[/]")


def _table(keys: Sequence[tuple[str, str]], rows: Sequence[dict[str, float]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", min_width=28)
    for column in ("last", f"mean of {RECENT}"):
        table.add_column(column, justify="right", min_width=11)
    table.add_column(f"last {TREND} steps")
    for key, text in keys:
        values = [row[key] for row in rows if math.isfinite(row.get(key, math.nan))]
        if values:
            recent = values[-RECENT:]
            figures = (f"{values[-1]:.4g}", f"{math.fsum(recent) / len(recent):.4g}")
            table.add_row(escape(_shown(text)), *figures, trend(values[-TREND:]))
    return table


def trend(values: Sequence[float]) -> str:
    """One block a value, the lowest and the highest of them at the ends of the scale."""
    low, high = min(values), max(values)
    if high <= low:
        return "▄" * len(values)
    return "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * ((v - low) / (high - low))))] for v in values)


def _shown(text: str) -> str:
    """A text of a run's files for a terminal: without control characters."""
    return "".join(c if c.isprintable() else "?" for c in text)
