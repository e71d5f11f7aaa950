"""The plot of a comparison: one line for each eval set."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from miles_like.limits.regular_files import replace_bytes
from miles_like.report.paired.verdict import Verdict
from miles_like.report.plots import BLUE, DPI, FAINT, GREEN, INK, VERMILION

_COLOURS = {"worse": VERMILION, "better": GREEN, "within noise": BLUE}


def write_plot(path: Path, found: Sequence[Verdict]) -> None:
    """A PNG: B - A of each set with the middle 95 % of its resamples; right of 0 B is better."""
    figure = Figure(figsize=(7.2, 1.6 + 0.5 * len(found)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.add_subplot()
    for place, verdict in enumerate(found):
        of, colour = verdict.found, _COLOURS[verdict.word]
        ax.plot((of.low, of.high), (place, place), color=colour, linewidth=2)
        ax.plot([of.change], [place], marker="o", color=colour)
    ax.axvline(0, color=FAINT, linewidth=1)
    shown = ["".join(c if c.isprintable() else "?" for c in v.name)[:40].replace("$", r"\$") for v in found]
    ax.set_yticks(range(len(found)), [f"{name}: {v.word}" for name, v in zip(shown, found, strict=True)])
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_title("B - A, with 95 % of its resamples", loc="left", fontsize=12, fontweight="bold", color=INK)
    ax.set_xlabel("mean reward", fontsize=9, color=FAINT)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    replace_bytes(path, image.getvalue())
