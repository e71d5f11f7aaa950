"""The table and the pictures of algorithms.py, no benchmark by itself."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from figures import END as FIGURES_END
from figures import begin, provenance
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from miles_like.report.plots import BLUE, DPI, FAINT, INK

Runs = Sequence[Mapping[str, Any]]  # of one preset, one for each seed
HEAD = (
    "preset",
    "accuracy before",
    "after",
    "tokens sampled",
    "gradient norm, largest / median",
    "entropy at the end",
    "largest KL to the rollout",
    "clipped",
    "skipped",
)
BEGIN, END = begin("benchmarks/algorithms.py"), FIGURES_END
SECTION = f"""
## Study

`benchmarks/algorithms.py` runs every preset on the tiny task from the same checkpoint, each rollout in 4 optimizer
steps with the same learning rate. Accuracy is greedy, over 600 held-out problems; ± is the standard deviation over
seeds. The gradient norm is that of the worst seed, KL is `mismatch/kl`, clipped the mean share of tokens, skipped the
optimizer steps whose loss or gradient was not finite.

{BEGIN}
{END}
"""
IMAGES = {"accuracy": "Held-out accuracy of each preset", "entropy": "Entropy of each preset"}


def write_study(found: Mapping[str, Runs], out: Path, docs: Path | None) -> dict[str, float]:
    """Table and pictures beside `out`, and in `docs`; the figures of the last line."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    lines += [f"| {' | '.join(_row(preset, runs))} |" for preset, runs in found.items()]
    table = "\n".join(lines)
    print(table)
    out.with_suffix(".md").write_text(table + "\n")
    _into(out.parent, found)
    if docs is not None:
        _into(docs / "images", found)
        _tell(docs / "studies" / "algorithms.md", table)
    return {f"accuracy_{preset}": mean([last(run) for run in runs]) for preset, runs in found.items()}


def _tell(page: Path, table: str) -> None:
    images = "\n\n".join(f"![{what}](../images/algorithms_{name}.png)" for name, what in IMAGES.items())
    put_into(page, SECTION, BEGIN, END, f"{table}\n\n{images}")


def put_into(page: Path, section: str, begin: str, end: str, text: str) -> None:
    """Replaces what stands between two lines of a page's section, which it is given where it has none."""
    now = page.read_text()
    if begin not in now:
        now = now.rstrip("\n") + "\n" + section
    at = now.index(begin) + len(begin)
    before, after = now[:at], now[now.index(end, at) :]
    page.write_text(f"{before}\n\n{text}\n\n{provenance()}\n\n{after}")


def last(run: Mapping[str, Any]) -> float | None:
    return run["accuracy"][-1][2] if run["accuracy"] else None


def mean(values: Sequence[float | None]) -> float:
    there = [v for v in values if v is not None]
    return statistics.fmean(there) if there else float("nan")


def spread(values: Sequence[float | None], form: str) -> str:
    """Mean +- standard deviation over seeds."""
    there = [v for v in values if v is not None]
    if not there:
        return "none"
    more = f" ± {format(statistics.stdev(there), form)}" if len(there) > 1 else ""
    return format(statistics.fmean(there), form) + more


def _row(preset: str, runs: Runs) -> list[str]:
    def largest(key: str, form: str) -> str:
        return format(max((r[key] for r in runs if r[key] is not None), default=float("nan")), form)

    norms = [r["grad_norm_max"] / r["grad_norm_median"] for r in runs if r["grad_norm_median"]]
    early = sum(r["ended"] is not None for r in runs)
    return [
        f"`{preset}`",
        spread([r["accuracy"][0][2] if r["accuracy"] else None for r in runs[:1]], ".3f"),
        spread([last(r) for r in runs], ".3f") + (f" ({early} of {len(runs)} ended early)" if early else ""),
        f"{mean([r['tokens'] for r in runs]) / 1000:,.0f} k",
        f"{max(norms, default=float('nan')):.1f}",
        spread([r["entropy"][-1][2] if r["entropy"] else None for r in runs], ".2f"),
        largest("kl_max", ".1e"),
        f"{mean([r['clip_frac'] for r in runs]):.1%}" if any(r["clip_frac"] is not None for r in runs) else "",
        f"{sum(r['skipped'] for r in runs):.0f}",
    ]


# pictures


def _into(folder: Path, found: Mapping[str, Runs]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _small_multiples(found, "accuracy", "Held-out accuracy, greedy", folder / "algorithms_accuracy.png")
    _small_multiples(found, "entropy", "Entropy of the policy, nats a token", folder / "algorithms_entropy.png")


def _small_multiples(found: Mapping[str, Runs], key: str, title: str, path: Path) -> None:
    """One panel a preset: its runs and their mean in blue, every preset's mean behind in grey; x: sampled tokens."""
    columns = min(4, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(2.5 * columns, 1.9 * rows + 0.6), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
    means = {preset: _mean_curve(runs, key) for preset, runs in found.items()}
    for ax, (preset, runs) in zip(axes, found.items(), strict=False):
        for other in means.values():
            ax.plot(*other, color="#DDDDDD", linewidth=0.8)
        for run in runs:
            ax.plot(
                [x / 1000 for _, x, _ in run[key]], [y for _, _, y in run[key]], color=BLUE, alpha=0.35, linewidth=1
            )
        ax.plot(*means[preset], color=BLUE, linewidth=1.8)
        ax.set_title(preset, loc="left", fontsize=9, color=INK)
        ax.tick_params(labelsize=7, colors=FAINT)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    for ax in axes[len(found) :]:
        ax.set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
    figure.supxlabel("thousand sampled tokens; grey: the other presets", fontsize=8, color=FAINT)
    figure.savefig(path)


def _mean_curve(runs: Runs, key: str) -> tuple[list[float], list[float]]:
    """Over the points that every run has."""
    points = list(zip(*(run[key] for run in runs), strict=False))
    return [mean([p[1] / 1000 for p in at]) for at in points], [mean([p[2] for p in at]) for at in points]
