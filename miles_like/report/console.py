"""The console's lines of a run: one for each step, warnings, and a summary at the end."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from miles_like.config.sections.watched.metric_direction import better
from miles_like.report.health import Warner
from miles_like.report.rows import json_row

Rows = Sequence[Mapping[str, float]]

HEADLINES = 10  # lines of the summary
SHOWN_FALL = 2.0  # standard errors below the best evaluation from which a step's line shows it
_SPEED_STEPS = 20  # last steps whose mean duration predicts the remaining time
# metric -> (its name, format) in the line of a step
_SHOWN = {
    "rollout/reward/mean": ("reward", "{:.3f}"),
    "rollout/accuracy": ("accuracy", "{:.3f}"),
    "train/loss": ("loss", "{:.4f}"),  # of a run without rewards
    "preference/accuracy": ("accuracy", "{:.3f}"),
    "rollout/len/mean": ("length", "{:.1f}"),
    "rollout/truncated_frac": ("truncated", "{:.0%}"),
    "train/entropy": ("entropy", "{:.3f}"),
    "train/kl_ref": ("kl ref", "{:.1e}"),
    "train/grad_norm": ("grad norm", "{:.3g}"),
}
# first the metrics by which a run is judged; train/loss says little where there is a reward
_HEADLINES = (
    *("rollout/reward/mean", "rollout/accuracy", "eval/", "train/loss", "preference/accuracy", "rollout/len/mean"),
    *("rollout/truncated_frac", "rollout/zero_std_group_frac", "train/entropy", "train/kl_ref", "train/grad_norm"),
    *("mismatch/kl", "perf/step_s", "perf/tokens_per_s_train", "preference/margin", "train/lr"),
)
_REPORTED = (
    *("rollout/reward/", "eval/", "preference/", "rollout/", "train/entropy", "train/grad_norm", "mismatch/"),
    *("routing/", "async/", "perf/"),
)


class JsonLines(Console):
    """A console for programs: prints nothing but one JSON object per step, as in metrics.jsonl, and per warning."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def write_line(self, text: str) -> None:
        self.file.write(f"{text}\n")
        self.file.flush()


def note(console: Console, text: str) -> None:
    """Print a line, indented to the second column of the lines of stages and steps."""
    console.print(f"{'':12}{text}", markup=False, soft_wrap=True)


def verbose() -> bool:
    """Whether mismatch, speed and phases are printed with each step: `-v`, or a `--log-level` of info or debug."""
    return logging.getLogger("miles_like").isEnabledFor(logging.INFO)


class ConsoleSink:
    """One line per step, a warning where one begins, and a summary when closed. Plain text without a terminal.

    rows: of the steps before, where a run resumes; they are in the summary and are not printed again. run_dir: is named
    below the summary. ends: whether the run ends when this is closed, and has a summary.
    """

    def __init__(
        self,
        *,
        steps: int,
        console: Console | None = None,
        rows: Rows = (),
        run_dir: Path | None = None,
        ends: Callable[[], bool] = lambda: True,
    ) -> None:
        self._steps, self._run_dir, self._ends = steps, run_dir, ends
        self._console = console or Console(highlight=False)
        self._rows, self._earlier = [dict(row) for row in rows], len(rows)
        self._warner = Warner()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._rows.append({"step": float(step), **metrics})
        warnings = self._warner.begun(self._rows)
        if isinstance(self._console, JsonLines):
            for text in (json_row(step, metrics), *(json.dumps({"step": step, "warning": w}) for w in warnings)):
                self._console.write_line(text)
            return
        # soft_wrap: a line cut to the guessed width of a log file would lose values
        line = step_line(self._rows, steps=self._steps, verbose=verbose())
        self._console.print(f"[bold]{escape(line[0])}[/]{escape(line[1])}", highlight=False, soft_wrap=True)
        for text in warnings:
            self._console.print(
                f"{'':12}[yellow]warning:[/] step {step}: {escape(text)}", highlight=False, soft_wrap=True
            )

    def close(self) -> None:
        if len(self._rows) > self._earlier and self._ends():
            self._console.print(summary_table(self._rows))
            if self._run_dir is not None:
                where = f"{'':12}all metrics: miles-like report {self._run_dir} --all"
                self._console.print(where, markup=False, highlight=False, soft_wrap=True)


def step_line(rows: Rows, *, steps: int, verbose: bool) -> tuple[str, str]:
    """(`step 40/100 02:10<03:15`, the figures) of the last of `rows`: seconds since the run began and, by the speed of
    the last steps, until its end."""
    row = rows[-1]
    head = f"step {int(row['step']):>{len(str(steps))}}/{steps}"
    if (elapsed := row.get("wall_s")) is not None:
        rest = remaining_s(rows, steps=steps)
        head += f" {duration(elapsed)}" + ("" if rest is None else f"<{duration(rest)}")
    return head, "".join(f"  {part}" for part in _figures(row, verbose=verbose))


def remaining_s(rows: Rows, *, steps: int) -> float | None:
    """Seconds until `steps` steps are done, by the mean duration of the last 20; None before the first step."""
    times = [(r["step"], r["wall_s"]) for r in rows[-_SPEED_STEPS - 1 :] if "wall_s" in r]
    if not times or not (first := times[0])[0] <= (last := times[-1])[0] <= steps:
        return None
    done = last[0] - first[0]
    step_s = (last[1] - first[1]) / done if done else rows[-1].get("perf/step_s")
    return None if step_s is None else step_s * (steps - last[0])


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """`02:10`, `1:02:10`, `2 d 01:02:10`."""
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days} d {h:02}:{m:02}:{s:02}"
    return f"{h}:{m:02}:{s:02}" if h else f"{m:02}:{s:02}"


def _figures(m: Mapping[str, float], *, verbose: bool) -> Iterator[str]:
    for key, (name, form) in _SHOWN.items():
        if key in m and not (key == "train/loss" and "rollout/reward/mean" in m):
            yield f"{name} {form.format(m[key])}"
    for key in m:
        if key.startswith("eval/") and not _is_quiet(key, m[key]):
            yield f"{key.removeprefix('eval/')} {m[key]:.3f}"
    if not verbose:
        return
    if "mismatch/kl" in m:
        worst = m.get("mismatch/logprob_abs_diff_max")
        yield f"mismatch kl {m['mismatch/kl']:.1e}" + (f" max {worst:.1e}" if worst is not None else "")
    names = ("rollout", "train")
    speed = [f"{n} {_thousands(m[f'perf/tokens_per_s_{n}'])}" for n in names if f"perf/tokens_per_s_{n}" in m]
    phases = [f"{n} {m[f'perf/{n}_s']:.2f}" for n in (*names, "publish") if f"perf/{n}_s" in m]
    for unit, parts in (("tok/s", speed), ("s", phases)):
        if parts:
            yield f"{unit} {' '.join(parts)}"


def _is_quiet(key: str, value: float) -> bool:
    """Whether a figure of an evaluation is as it should be, and not shown in the line of a step."""
    return (key.endswith("/unscored_frac") and not value) or (key.endswith("/regression") and value < SHOWN_FALL)


def _thousands(value: float) -> str:
    return f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.0f}"


def first_last_best(rows: Rows, key: str) -> tuple[float, float, float | None] | None:
    """First, last and best finite value of a key over a run's rows; best is None for a key without a better
    direction."""
    values = [r[key] for r in rows if r.get(key) is not None and math.isfinite(r[key])]
    if not values:
        return None
    sign = better(key)
    return values[0], values[-1], (max(values) if sign > 0 else min(values)) if sign else None


def reported_keys(rows: Rows) -> list[str]:
    """The keys that a report shows, in its order."""
    found = dict.fromkeys(k for row in rows for k in row)
    return list(dict.fromkeys(k for prefix in _REPORTED for k in found if k.startswith(prefix)))


def headline_keys(rows: Rows) -> list[str]:
    """The ten keys by which a run is judged, in order."""
    found = dict.fromkeys(k for row in rows for k in row if not k.endswith(("/unscored_frac", "/regression")))
    without = {"train/loss"} if "rollout/reward/mean" in found else set()
    first = {k.split("/")[1]: k for k in reversed(found) if k.startswith("eval/")}  # set -> its first metric
    keys = [
        k for name in _HEADLINES for k in (reversed(first.values()) if name == "eval/" else [name] * (name in found))
    ]
    return [k for k in keys if k not in without][:HEADLINES]


def summary_table(rows: Rows, *, whole: bool = False) -> Table:
    """First, last and best values of a run. whole: of every metric that was measured."""
    table = Table(title=counted(int(rows[-1]["step"]), "step"), title_justify="left")
    table.add_column("metric")
    for name in ("first", "last", "best"):
        table.add_column(name, justify="right")
    keys = headline_keys(rows)
    if whole:
        keys = list(dict.fromkeys([*keys, *reported_keys(rows), *(k for row in rows for k in row if k != "step")]))
    for key in keys:
        found = first_last_best(rows, key)
        if found is not None:
            shown = key if key.isprintable() else ascii(key)  # of a run directory that others may have written
            table.add_row(escape(shown), *("" if v is None else f"{v:.4g}" for v in found))
    return table
