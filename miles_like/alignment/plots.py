"""The alignment report as PNG files: the gap per step, the gap over positions, the importance ratios, the agreement of
routes per layer, the residual stream per layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from miles_like.alignment.report import Report, rho_histogram
from miles_like.report.plots import BLUE, DPI, FAINT, GREEN, INK, VERMILION


def write_plots(report: Report, folder: Path) -> list[Path]:
    """`verify_steps.png`, `verify_positions.png`, `verify_rho.png`, where routes were compared `verify_layers.png`, and
    where residual streams were `verify_states.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    drawers: dict[str, Callable[[Axes, Report], None]] = {"steps": _steps, "positions": _positions, "rho": _rho}
    if report.profile.layers:
        drawers["layers"] = _layers
    if report.layers:
        drawers["states"] = _states
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
    _dress(ax, "Mismatch before each step", "KL between rollout and trainer (k3), nats/token", "step")


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
        "Mismatch over the response",
        "difference of log-probabilities, nats/token; line: mean",
        "position in the response",
    )


def _rho(ax: Axes, report: Report) -> None:
    """Tokens by importance ratio, both axes logarithmic; the outermost bars are all ratios beyond."""
    rho = rho_histogram(report.profile.delta)
    step = rho.edges[1] / rho.edges[0]
    left = [rho.edges[0] / step, *rho.edges]
    ax.bar(left, rho.counts, width=[x * (step - 1) for x in left], align="edge", color=BLUE)
    ax.set_xscale("log", base=2)
    ax.set_xlim(left[0], left[-1] * step)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.set_yscale("symlog", linthresh=1)
    if rho.nan:
        ax.text(1, 1.035, f"{rho.nan} not a number", transform=ax.transAxes, ha="right", fontsize=9, color=VERMILION)
    _dress(ax, "Importance ratios", "tokens", "probability by the trainer / by the rollout")


def _layers(ax: Axes, report: Report) -> None:
    """Share of rows whose recorded set of experts equals the trainer's."""
    shares = report.profile.agreement.tolist()
    ax.bar(report.profile.layers, shares, color=BLUE, width=0.6)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    ax.set_ylim(0, 1.05)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    _dress(ax, "Routing agreement", "share of tokens for which trainer and rollout choose the same experts", "layer")


def _states(ax: Axes, report: Report) -> None:
    """Difference of each part of a layer as a share of what is explained, for the server where it is largest."""
    worst = max(report.layers, key=lambda c: max(part.share for part in c.parts))
    shares = [part.share for part in worst.parts]
    finite = [share if math.isfinite(share) else max(2.0, *filter(math.isfinite, [0.0, *shares])) for share in shares]
    colours = [VERMILION if part.differs else BLUE for part in worst.parts]
    ax.bar([part.state / 2 for part in worst.parts], finite, color=colours, width=0.4)
    ax.axhline(1.0, color=INK, linewidth=1)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    _dress(
        ax,
        f"Residual streams: {'no part' if worst.first is None else worst.first.name} differs first",
        "difference of a part's output / explained difference",
        "layer; half of it: its attention",
    )
