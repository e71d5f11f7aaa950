"""Metric sinks: a JSON lines file, TensorBoard, the console."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch.utils.tensorboard import SummaryWriter

from miles_like.config.sections.metric_direction import better
from miles_like.protocols import MetricSink
from miles_like.storage.appended_file import AppendedFile

NON_FINITE = "nonfinite_count"


class JsonlSink:
    """`metrics.jsonl`: one object per step, appended and flushed, so that a killed run keeps its metrics.

    JSON has no nan or infinity: such values are written as null, and `nonfinite_count` is their number.
    """

    def __init__(self, path: Path) -> None:
        self.file = AppendedFile(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        row: dict[str, float | None] = {"step": step}
        row |= {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        bad = sum(v is None for v in row.values())
        if bad:
            row[NON_FINITE] = bad
        self.file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        self.file.close()


class TensorboardSink:
    """Event files under `folder`. Points of earlier files after step `first` are purged: all of them with first = 0."""

    def __init__(self, folder: Path, *, first: int = 0) -> None:
        self._writer = SummaryWriter(str(folder), purge_step=first + 1 if first else 0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class MultiSink:
    """Writes to several sinks in turn."""

    def __init__(self, sinks: Iterable[MetricSink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.write(step, metrics)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


class ConsoleSink:
    """One compact line per step, and a table of first, last and best values when closed. Plain text without a
    terminal."""

    def __init__(self, *, steps: int, console: Console | None = None) -> None:
        self._steps = steps
        self._console = console or Console(highlight=False)
        self._rows: list[Mapping[str, float]] = []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.append(dict(metrics))
        # soft_wrap: a line cut to the guessed width of a log file would lose values
        self._console.print(self._line(step, metrics), soft_wrap=True)

    def close(self) -> None:
        if self._rows:
            self._console.print(summary_table(self._rows))

    def _line(self, step: int, m: Mapping[str, float]) -> str:
        width = len(str(self._steps))
        parts = [f"[bold]step {step:>{width}}/{self._steps}[/bold]"]
        if "rollout/reward/mean" in m:
            parts.append(f"reward [green]{m['rollout/reward/mean']:.3f}[/green]")
        elif "train/loss" in m:
            parts.append(f"loss [green]{m['train/loss']:.4f}[/green]")
        shown = [k for k in m if k.startswith("eval/") and (m[k] or not k.endswith("/unscored_frac"))]
        parts += [f"{k.removeprefix('eval/')} [bold green]{m[k]:.3f}[/bold green]" for k in shown]
        if "mismatch/kl" in m:
            worst = m.get("mismatch/logprob_abs_diff_max")
            parts.append(f"mismatch kl {m['mismatch/kl']:.1e}" + (f" max {worst:.1e}" if worst is not None else ""))
        speed = [
            f"{name} {_thousands(m[key])}"
            for name, key in (("rollout", "perf/tokens_per_s_rollout"), ("train", "perf/tokens_per_s_train"))
            if key in m
        ]
        if speed:
            parts.append("tok/s " + " ".join(speed))
        phases = [
            f"{name} {m[f'perf/{name}_s']:.2f}" for name in ("rollout", "train", "publish") if f"perf/{name}_s" in m
        ]
        if phases:
            parts.append("s " + " ".join(phases))
        return "  ".join(parts)


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def first_last_best(rows: Sequence[Mapping[str, float]], key: str) -> tuple[float, float, float | None] | None:
    """First, last and best finite value of a key over a run's rows; best is None for a key without a better
    direction."""
    values = [r[key] for r in rows if r.get(key) is not None and math.isfinite(r[key])]
    if not values:
        return None
    sign = better(key)
    return values[0], values[-1], (max(values) if sign > 0 else min(values)) if sign else None


def headline_keys(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """The keys that the summary table shows, in its order."""
    found = dict.fromkeys(k for row in rows for k in row)
    order = (
        "rollout/reward/",
        "eval/",
        "preference/",
        "rollout/",
        "train/entropy",
        "train/grad_norm",
        "mismatch/",
        "routing/",
        "async/",
        "perf/",
    )
    return list(dict.fromkeys(k for prefix in order for k in found if k.startswith(prefix)))


def summary_table(rows: Sequence[Mapping[str, float]]) -> Table:
    table = Table(title=f"{len(rows)} steps")
    table.add_column("metric")
    for name in ("first", "last", "best"):
        table.add_column(name, justify="right")
    for key in headline_keys(rows):
        found = first_last_best(rows, key)
        if found is not None:
            table.add_row(key, *("" if v is None else f"{v:.4g}" for v in found))
    return table
