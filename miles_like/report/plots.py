"""Plots of a run's metrics as PNG files.

All have the same style: a title that names the quantity, its unit below, one x axis in optimizer steps, the Okabe-Ito
colours (distinguishable with any colour vision), and each line labelled at its end instead of in a legend box.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from miles_like.limits.regular_files import replace_bytes

Rows = Sequence[Mapping[str, float]]

BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
DPI = 150
INK, FAINT = "#222222", "#767676"
PHASES = {"rollout": BLUE, "train": ORANGE, "publish": GREEN}  # perf/{phase}_s, bottom to top
FATES = {"trained": BLUE, "discarded": VERMILION}  # ledger/{fate}, bottom to top
_NO_ACCURACY = (
    "/unscored_frac",
    "/loss",
    "/margin",
    "/regression",
)  # suffixes of eval/{set}/... that are no share of right answers
TITLES = {  # file name -> its description in the report
    "reward": "Reward",
    "accuracy": "Held-out accuracy",
    "loss": "Held-out loss",
    "entropy": "Entropy",
    "mismatch": "Trainer-rollout mismatch",
    "routing": "Expert routes",
    "time": "Time per step",
    "ledger": "Sample outcomes",
}


def series(rows: Rows, key: str) -> tuple[list[float], list[float]]:
    """(steps, values) where the key is present and finite."""
    found = [(r["step"], r[key]) for r in rows if key in r and math.isfinite(r[key])]
    return [s for s, _ in found], [v for _, v in found]


def write_plots(rows: Rows, folder: Path) -> list[Path]:
    """Write a PNG for each of TITLES that the rows have values for, in that order. `rows` ascend in `step`."""
    folder.mkdir(parents=True, exist_ok=True)
    drawers = (_reward, _accuracy, _loss, _entropy, _mismatch, _routing, _time, _ledger)
    written = []
    for name, draw in zip(TITLES, drawers, strict=True):
        figure = Figure(figsize=(7.2, 3.7), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        if draw(figure.add_subplot(), rows):
            path, image = folder / f"{name}.png", io.BytesIO()
            figure.savefig(image, format="png")
            replace_bytes(path, image.getvalue())
            written.append(path)
    return written


def _dress(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22)
    ax.text(0, 1.035, unit, transform=ax.transAxes, fontsize=9, color=FAINT, va="bottom")
    ax.set_xlabel("optimizer step", fontsize=9, color=FAINT)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    ax.tick_params(which="both", labelsize=9, colors=FAINT, length=0)
    ax.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    left, right = ax.get_xlim()
    if right - left < 2:  # a run of one or two steps
        ax.set_xlim((left + right) / 2 - 1, (left + right) / 2 + 1)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#BBBBBB")


def _name_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Labels at (x, y) of the lines' ends, moved apart vertically so that they do not overlap."""
    if not ends:
        return
    figure = ax.get_figure(root=True)
    assert figure is not None
    layout = figure.get_layout_engine()
    assert layout is not None
    layout.execute(figure)  # fixes the scales that the pixel positions below depend on
    placed = sorted(((float(ax.transData.transform((x, y))[1]), x, y, text, c) for x, y, text, c in ends))
    gap = 14 * DPI / 72  # pixels between two lines of text of 9 points
    heights = [p[0] for p in placed]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    top = float(ax.transAxes.transform((0, 1))[1])
    heights = [h - max(0.0, heights[-1] - top) for h in heights]
    for h, (at, x, y, text, colour) in zip(heights, placed, strict=True):
        ax.annotate(
            text,
            (x, y),
            xytext=(6, (h - at) * 72 / DPI),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=colour,
            annotation_clip=False,
        )


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values, fewer at the start."""
    return [math.fsum(values[max(0, i - window + 1) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def _window(count: int) -> int:
    """The window of the running mean for a run of `count` steps."""
    return max(1, count // 15)


def _noisy_line(ax: Axes, rows: Rows, key: str, colour: str) -> tuple[float, float] | None:
    """Draws each step faintly and the running mean boldly; returns the end of the latter."""
    steps, values = series(rows, key)
    if not steps:
        return None
    window = _window(len(values))
    mean = _smooth(values, window)
    if window > 1:
        ax.plot(steps, values, color=colour, alpha=0.3, linewidth=0.9)
    ax.plot(steps, mean, color=colour, linewidth=2, marker="o" if len(steps) == 1 else None)
    return steps[-1], mean[-1]


def _reward(ax: Axes, rows: Rows) -> bool:
    end = _noisy_line(ax, rows, "rollout/reward/mean", BLUE)
    if end is None:
        return False
    window = _window(len(series(rows, "rollout/reward/mean")[0]))
    smooth = f"; bold: mean over the last {window} steps" if window > 1 else ""
    _dress(ax, "Reward of the sampled answers", f"mean over the step's samples{smooth}")
    _name_ends(ax, [(*end, f"{end[1]:.2f}", BLUE)])
    return True


def _held_out(ax: Axes, rows: Rows, keys: Sequence[str], unit: str) -> list[tuple[float, float, str, str]]:
    """Draws a line for each key that has values; returns the labelled ends, with values in the format `unit`."""
    ends = []
    for key, colour in zip(keys, COLOURS * len(keys), strict=False):
        steps, values = series(rows, key)
        if steps:
            ax.plot(steps, values, color=colour, linewidth=2, marker="o", markersize=5)
            ends.append((steps[-1], values[-1], f"{_label(key.removeprefix('eval/'))}  {values[-1]:{unit}}", colour))
            if len(steps) > 1 and len(keys) == 1:
                ax.annotate(
                    f"{values[0]:{unit}}",
                    (steps[0], values[0]),
                    xytext=(0, -14),
                    textcoords="offset points",
                    fontsize=9,
                    color=colour,
                    ha="left",
                )
    return ends


def _accuracy(ax: Axes, rows: Rows) -> bool:
    keys = sorted({k for r in rows for k in r if k.startswith("eval/") and not k.endswith(_NO_ACCURACY)})
    ends = _held_out(ax, rows, keys, ".1%")
    if not ends:
        return False
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    _dress(ax, "Accuracy on held-out questions", "share answered right; never trained on")
    ax.margins(y=0.15)
    _name_ends(ax, ends)
    return True


def _loss(ax: Axes, rows: Rows) -> bool:
    keys = sorted({k for r in rows for k in r if k.startswith("eval/") and k.endswith("/loss")})
    ends = _held_out(ax, rows, keys, ".3f")
    if not ends:
        return False
    _dress(ax, "Loss on held-out examples", "nats, mean over tokens or pairs; never trained on")
    ax.margins(y=0.15)
    _name_ends(ax, ends)
    return True


def _entropy(ax: Axes, rows: Rows) -> bool:
    end = _noisy_line(ax, rows, "train/entropy", PURPLE)
    if end is None:
        return False
    _dress(ax, "Entropy of the policy", "nats/token, mean over response tokens")
    ax.set_ylim(bottom=0)
    _name_ends(ax, [(*end, f"{end[1]:.2f}", PURPLE)])
    return True


def _mismatch(ax: Axes, rows: Rows) -> bool:
    lines = {
        "mismatch/logprob_abs_diff_max": ("largest |Δ|", VERMILION),
        "mismatch/logprob_abs_diff": ("mean |Δ|", BLUE),
        "mismatch/kl": ("KL (k3)", GREEN),
    }
    measured = zeros = 0
    ends = []
    for key, (name, colour) in lines.items():
        steps, values = series(rows, key)
        positive = [(s, v) for s, v in zip(steps, values, strict=True) if v > 0]
        measured, zeros = measured + len(values), zeros + len(values) - len(positive)
        if positive:
            xs, ys = zip(*positive, strict=True)
            ax.plot(xs, ys, color=colour, linewidth=1.6, marker="o" if len(xs) < 3 else None, markersize=5)
            ends.append((xs[-1], ys[-1], name, colour))
    if not measured:
        return False
    if ends:
        ax.set_yscale("log")
        omitted = f"; {zeros} exact zeros not drawn" if zeros else ""
        _dress(ax, "Trainer-rollout mismatch", f"Δ: difference of log-probabilities, nats/token{omitted}")
        _name_ends(ax, ends)
    else:
        ax.text(0.5, 0.5, "exactly 0 at every step", transform=ax.transAxes, ha="center", fontsize=14, color=GREEN)
        ax.set_yticks([])
        _dress(ax, "Trainer-rollout mismatch", "Δ: difference of log-probabilities, nats/token")
    return True


def _routing(ax: Axes, rows: Rows) -> bool:
    lines = {
        "routing/agreement": ("trainer's routers choose the same experts", BLUE),
        "routing/replay_coverage": ("replayed", ORANGE),
    }
    ends = []
    low = 1.0
    for key, (name, colour) in lines.items():
        steps, values = series(rows, key)
        if steps:
            low = min(low, *values)
            ax.plot(steps, values, color=colour, linewidth=1.8, marker="o" if len(steps) == 1 else None)
            ends.append((steps[-1], values[-1], name, colour))
    if not ends:
        return False
    span = max(1 - low, 0.02)
    ax.set_ylim(max(0.0, 1 - 1.15 * span), 1 + 0.05 * span)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    _dress(ax, "Expert routes", "share of (token, layer) pairs; agrees: the trainer's own experts are the rollout's")
    _name_ends(ax, ends)
    return True


def _time(ax: Axes, rows: Rows) -> bool:
    keys = [f"perf/{p}_s" for p in PHASES]
    timed = [r for r in rows if any(math.isfinite(r.get(k, math.nan)) for k in keys)]
    if not timed:
        return False
    steps = [r["step"] for r in timed]
    bars: list[tuple[str, str, list[float]]] = [
        (phase, colour, [_seconds(r, f"perf/{phase}_s") for r in timed]) for phase, colour in PHASES.items()
    ]
    # the step's remaining time: evaluation, packing, checkpoints; 0 when phases overlap (asynchronous loop)
    rest = [max(0.0, _seconds(r, "perf/step_s") - sum(_seconds(r, k) for k in keys)) for r in timed]
    bars.append(("other", "#C8C8C8", rest))
    ends = _stacked(ax, steps, bars, "{:.2f} s")
    _dress(ax, "Time per step", "seconds; the figures are means over the run")
    _name_ends(ax, ends)
    return True


def _ledger(ax: Axes, rows: Rows) -> bool:
    """The rows hold totals since the run began; each bar is the increase of one step. False too where nothing was
    discarded."""
    complete = [r for r in rows if all(math.isfinite(r.get(f"ledger/{k}", math.nan)) for k in FATES)]
    if not any(r["ledger/discarded"] for r in complete):
        return False
    bars = []
    for name, colour in FATES.items():
        totals = [0.0, *(r[f"ledger/{name}"] for r in complete)]
        bars.append((name, colour, [after - before for before, after in itertools.pairwise(totals)]))
    ends = _stacked(ax, [r["step"] for r in complete], bars, "{:.1f}")
    _dress(ax, "Sample outcomes", "samples per step; the numbers are means over the run")
    _name_ends(ax, ends)
    return True


def _stacked(
    ax: Axes, steps: Sequence[float], bars: Sequence[tuple[str, str, list[float]]], mean: str
) -> list[tuple[float, float, str, str]]:
    """Draws one stacked bar per step from segments (name, colour, values), bottom to top; returns the labelled ends,
    with the segments' means."""
    floor = [0.0] * len(steps)
    width = (steps[-1] - steps[0]) / (len(steps) - 1) if len(steps) > 1 else 1.0
    ends = []
    for name, colour, values in bars:
        if not any(values):
            continue
        ax.bar(steps, values, bottom=floor, width=width, color=colour, linewidth=0)
        label = f"{name}  {mean.format(math.fsum(values) / len(values))}"
        ends.append((steps[-1] + width / 2, floor[-1] + values[-1] / 2, label, FAINT if name == "other" else colour))
        floor = [f + v for f, v in zip(floor, values, strict=True)]
    ax.margins(x=0.01)
    return ends


def _label(name: str) -> str:
    """A user's name for matplotlib: escaped against formulas, printable characters only, at most 40 of them."""
    shown = "".join(c if c.isprintable() else "?" for c in name)
    return (shown if len(shown) <= 40 else f"{shown[:39]}…").replace("$", r"\$")


def _seconds(row: Mapping[str, float], key: str) -> float:
    value = row.get(key, 0.0)
    return value if math.isfinite(value) else 0.0
