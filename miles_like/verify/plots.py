"""The alignment report as PNG files: the gap per step, the gap over positions, the agreement of routes per layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from miles_like.report.plots import BLUE, DPI, FAINT, GREEN, INK, VERMILION
from miles_like.verify.report import Report


def write_plots(report: Report, folder: Path) -> list[Path]:
    """`verify_steps.png`, `verify_positions.png` and, where routes were compared, `verify_layers.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    drawers: dict[str, Callable[[Axes, Report], None]] = {"steps": _steps, "positions": _positions}
    if report.profile.layers:
        drawers["layers"] = _layers
    written = []
    for name, draw in drawers.items():
        figure = Figure(figsize=(7.2, 3.7), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        draw(figure.add_subplot(), report)
        written.append(folder / f"verify_{name}.png")
        figure.savefig(written[-1])
    return written


def _dress(ax: Axes, title: str, unit: str, x: str) -> None:
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22)
    ax.text(0, 1.035, unit, transform=ax.transAxes, fontsize=9, color=FAINT, va="bottom")
    ax.set_xlabel(x, fontsize=9, color=FAINT)
    ax.tick_params(which="both", labelsize=9, colors=FAINT, length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)


def _steps(ax: Axes, report: Report) -> None:
    """The gap before each step; steps with causes in another colour, annotated with the causes."""
    known = [f for f in report.findings if math.isfinite(f.before.kl)]
    values = [f.before.kl for f in known]
    colours = [VERMILION if f.causes else BLUE for f in known]
    ax.bar(range(len(known)), values, color=colours, width=0.6)
    ax.set_xticks(range(len(known)), [f.step for f in known])
    for i, f in enumerate(known):
        if not f.before.kl and any(values):
            continue  # 0 has no place on a logarithmic axis
        label = "\n".join(cause.value for cause, _ in f.causes) or f"{f.before.kl:.1e}"
        colour = VERMILION if f.causes else FAINT
        ax.annotate(label, (i, f.before.kl), ha="center", va="bottom", fontsize=8, color=colour)
    if any(values):
        ax.set_yscale("log")
        ax.margins(y=0.15)
    _dress(ax, "The gap before each step", "KL of trainer from rollout (k3), nats per token", "step")


def _positions(ax: Axes, report: Report) -> None:
    """Every token, and the mean per position."""
    position, size = report.profile.position, report.profile.delta.abs().nan_to_num(0.0)
    ax.scatter(position.tolist(), size.tolist(), s=9, color=BLUE, alpha=0.35, linewidths=0)
    last = int(position.max())
    means = [float(size[position == p].mean()) for p in range(last + 1)]
    ax.plot(range(last + 1), means, color=VERMILION, linewidth=1.8)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8, min_n_ticks=1))
    if not float(size.max()):
        ax.text(0.5, 0.5, "exactly 0 everywhere", transform=ax.transAxes, ha="center", fontsize=14, color=GREEN)
    _dress(
        ax,
        "The gap over the response",
        "difference of log-probabilities of a token, nats; line: mean",
        "position in the response",
    )


def _layers(ax: Axes, report: Report) -> None:
    """Share of rows whose recorded set of experts equals the trainer's."""
    shares = report.profile.agreement.tolist()
    ax.bar(report.profile.layers, shares, color=BLUE, width=0.6)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    ax.set_ylim(0, 1.05)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    _dress(ax, "Agreement of routes", "share of tokens for which both sides choose the same experts", "layer")
