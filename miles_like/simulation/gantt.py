"""The picture of a simulated run: what each server and the trainer do over time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from miles_like.limits.regular_files import replace_bytes
from miles_like.simulation.clock.timeline import ServerInterval, TrainerState
from miles_like.simulation.figures import warm_steps
from miles_like.simulation.simulate import Outcome

# Okabe-Ito colours, as in miles_like/report/plots.py
COLOURS: dict[TrainerState, str] = {
    "experience": "#CC79A7",
    "train": "#E69F00",
    "publish": "#009E73",
    "evaluate": "#56B4E9",
    "save": "#F0E442",
    "turn": "#999999",
    "restart": "#D55E00",
}
SERVER, PAUSED = "#0072B2", "#009E73"
DPI, INK, FAINT = 150, "#222222", "#767676"
STEPS, LANES = 6, 16  # shown


def write_gantt(outcome: Outcome, path: Path, *, title: str = "", steps: int = STEPS) -> None:
    """Writes a PNG of `steps` steps after the first ones: a lane for the trainer and one for each of up to 16 servers,
    whose colour deepens with the size of the batch. Lines are publications."""
    write_gantts([(title, outcome)], path, steps=steps)


def write_gantts(outcomes: Sequence[tuple[str, Outcome]], path: Path, *, steps: int = STEPS) -> None:
    """The same for several runs, one below the other, with one scale of time."""
    lanes = [min(len(o.servers), LANES) + 1 for _, o in outcomes]
    heights = [0.28 * n + 0.75 for n in lanes]
    figure = Figure(figsize=(9.0, sum(heights) + 0.5), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(outcomes), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    windows = [_window(o, steps) for _, o in outcomes]
    longest = max(end - begin for begin, end in windows)
    states = dict.fromkeys(s for (_, o), w in zip(outcomes, windows, strict=True) for s in _states(o, *w))
    for ax, (title, outcome), (begin, _) in zip(axes, outcomes, windows, strict=True):
        _draw(ax, outcome, begin, begin + longest)
        ax.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK)
    axes[-1].set_xlabel("seconds", fontsize=9, color=FAINT)
    marks = [Patch(color=SERVER, label="sampling, darker: larger batch"), Patch(color=PAUSED, label="publish, paused")]
    marks += [Patch(color=c, label=s) for s, c in COLOURS.items() if s in states and s != "publish"]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), fontsize=8, frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    replace_bytes(path, image.getvalue())


def _window(outcome: Outcome, steps: int) -> tuple[float, float]:
    rows = outcome.state.rows
    first = warm_steps(len(rows), outcome.settings.max_staleness)
    first = min(first, max(len(rows) - steps, 0))
    last = min(first + steps, len(rows)) - 1
    return (rows[first - 1].published if first else 0.0), rows[last].published


def _states(outcome: Outcome, begin: float, end: float) -> set[TrainerState]:
    return {i.state for i in outcome.trainer if i.end > begin and i.begin < end}


def _draw(ax: Axes, outcome: Outcome, begin: float, end: float) -> None:
    servers = list(outcome.servers)[:LANES]
    most = max((i.running for t in servers for i in t.intervals), default=1) or 1
    for lane, timeline in enumerate(servers, 1):
        shown = [i for i in timeline.intervals if i.end > begin and i.begin < end and i.state != "idle"]
        spans = [(max(i.begin, begin) - begin, min(i.end, end) - max(i.begin, begin)) for i in shown]
        ax.broken_barh(spans, (lane - 0.4, 0.8), facecolors=[_shade(i, most) for i in shown], linewidth=0)
    for state, colour in COLOURS.items():
        spans = [
            (max(i.begin, begin) - begin, min(i.end, end) - max(i.begin, begin))
            for i in outcome.trainer
            if i.state == state and i.end > begin and i.begin < end
        ]
        ax.broken_barh(spans, (-0.4, 0.8), facecolors=colour, linewidth=0)
    for row in outcome.state.rows:
        if begin <= row.published <= end:
            ax.axvline(row.published - begin, color="#BBBBBB", linewidth=0.6, zorder=0)
    ax.set_yticks(range(len(servers) + 1), ["trainer", *(f"server {i}" for i in range(len(servers)))])
    ax.set_xlim(0, end - begin)
    ax.set_ylim(len(servers) + 0.6, -0.6)
    ax.tick_params(labelsize=8, colors=FAINT, length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)


def _shade(interval: ServerInterval, most: int) -> tuple[float, float, float]:
    if interval.state == "paused":
        return to_rgb(PAUSED)
    strength = 0.25 + 0.75 * interval.running / most
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(SERVER))
    return red, green, blue
