"""Plots of a `QuantReport`: the signal-to-noise ratio over the layers, and the code usage of each layer.

Titles, units and colours are those of a run's plots.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from miles_like.pipeline.quant_report import QuantReport, WeightStats
from miles_like.report.plots import COLOURS, FAINT, INK

SNR = "snr_by_layer.png"
_DPI = 100
_SPAN = 2.0  # dB, the least range of a panel


def write_quant_plots(report: QuantReport, folder: Path) -> list[Path]:
    """Write SNR, with a panel per kind of weight and a line per projection, and layer_NNN.png, with the frequency of
    each code magnitude; return the paths."""
    folder.mkdir()
    written = [folder / SNR]
    _snr(report, written[0])
    layers: dict[int, dict[str, WeightStats]] = {}
    for (layer, kind), stats in report.by("layer", "kind").items():
        layers.setdefault(layer, {})[kind] = stats
    for layer, stats_by_kind in layers.items():
        written.append(folder / f"layer_{layer:03d}.png")
        _occupancy(report, layer, stats_by_kind, written[-1])
    return written


def _snr(report: QuantReport, path: Path) -> None:
    kinds: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for (kind, projection, layer), stats in report.by("kind", "projection", "layer").items():
        if stats.snr_db is not None:
            layers, values = kinds.setdefault(kind, {}).setdefault(projection, ([], []))
            layers.append(layer)
            values.append(stats.snr_db)
    figure = _figure(7.2, 0.3 + 2.6 * max(1, len(kinds)))
    panels = figure.subplots(max(1, len(kinds)), 1, sharex=True, squeeze=False)[:, 0]
    for ax, (kind, lines) in zip(panels, kinds.items(), strict=False):
        for i, (projection, (layers, values)) in enumerate(lines.items()):
            style = "-" if i < len(COLOURS) else "--"
            colour = COLOURS[i % len(COLOURS)]
            ax.plot(layers, values, style, color=colour, marker="o", markersize=3, linewidth=1.3, label=projection)
        low, high = ax.get_ylim()
        if high - low < _SPAN:  # a smaller range would exaggerate negligible differences
            ax.set_ylim((low + high - _SPAN) / 2, (low + high + _SPAN) / 2)
        _dress(ax, f"{kind[0].upper()}{kind[1:]}", f"{report.spec.format}: signal to noise, dB")
        ax.legend(fontsize=8, frameon=False, ncols=4, labelcolor=INK)
    panels[-1].set_xlabel("layer", fontsize=9, color=FAINT)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    figure.savefig(path)


def _occupancy(report: QuantReport, layer: int, stats_by_kind: Mapping[str, WeightStats], path: Path) -> None:
    figure = _figure(7.2, 3.4)
    ax = figure.add_subplot()
    magnitudes: list[float] = []
    for i, (kind, stats) in enumerate(stats_by_kind.items()):
        magnitudes, shares = report.occupancy(stats)
        at = range(len(magnitudes))
        ax.plot(at, [100 * s for s in shares], drawstyle="steps-mid", color=COLOURS[i], linewidth=1.3, label=kind)
    _dress(ax, f"Layer {layer}", f"{report.spec.format}: % of codes")
    every = max(1, len(magnitudes) // 8)
    ticks = sorted({*range(0, len(magnitudes), every), len(magnitudes) - 1})
    ax.set_xticks(ticks, [f"{magnitudes[t]:.3g}" for t in ticks])
    ax.set_xlabel("magnitude before scaling", fontsize=9, color=FAINT)
    ax.legend(fontsize=8, frameon=False, labelcolor=INK)
    figure.savefig(path)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _dress(ax: Axes, title: str, unit: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=18)
    ax.text(0, 1.03, unit, transform=ax.transAxes, fontsize=8, color=FAINT, va="bottom")
    ax.tick_params(which="both", labelsize=8, colors=FAINT, length=0)
    ax.grid(axis="y", color="#E4E4E4", linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color("#BBBBBB")
