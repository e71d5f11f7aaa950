"""Compare runs in one plot and two tables: `compare_runs.py OUT.png LABEL=DIR[,DIR...] ...`.

The directories of a label are the same run with other seeds. Curves are means, bands span the lowest to the highest
seed. One table has accuracy and reward, the other the mismatch of trainer and rollout at step 1, before any weight has
changed, and over all later steps.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, pstdev

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = (
    ("rollout/reward/mean", "mean reward of a step", "linear"),
    ("eval/heldout/avg@1", "greedy accuracy, held out", "linear"),
    ("mismatch/kl", "KL of rollout and trainer (k3)", "log"),
    ("routing/agreement", "share of routes that agree", "linear"),
)
_SMOOTH = 5  # steps of the moving mean, for metrics of every step


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def curve(run: Sequence[dict[str, float]], key: str) -> dict[int, float]:
    found = [(int(r["step"]), r[key]) for r in run if key in r and math.isfinite(r[key])]
    if key.startswith("eval/"):
        return dict(found)
    return {s: fmean(v for _, v in found[max(0, i - _SMOOTH + 1) : i + 1]) for i, (s, _) in enumerate(found)}


def draw(runs: dict[str, list[list[dict[str, float]]]], out: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    for axis, (key, title, scale) in zip(axes.flat, PANELS, strict=True):
        for label, seeds in runs.items():
            curves = [curve(run, key) for run in seeds]
            steps = sorted(set.intersection(*(set(c) for c in curves)))
            if not steps:
                continue
            values = [[c[s] for c in curves] for s in steps]
            (line,) = axis.plot(steps, [fmean(v) for v in values], label=label, linewidth=1.4)
            axis.fill_between(
                steps, [min(v) for v in values], [max(v) for v in values], alpha=0.12, color=line.get_color()
            )
        axis.set(title=title, xlabel="step", yscale=scale)
        axis.grid(alpha=0.3)
    axes.flat[0].legend(fontsize=8)
    figure.savefig(out, dpi=110)


def table(runs: dict[str, list[list[dict[str, float]]]]) -> str:
    """Markdown: for each label, accuracy at the end, and reward and mismatch over the last quarter."""
    lines = [
        "| run | accuracy, each seed | mean | reward, last quarter | KL, last quarter | largest gap | agreement |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, seeds in runs.items():
        ends = [[r["eval/heldout/avg@1"] for r in run if "eval/heldout/avg@1" in r][-1] for run in seeds]
        last = [[r for r in run if r["step"] > 0.75 * run[-1]["step"]] for run in seeds]

        def mean(key: str, last: list[list[dict[str, float]]] = last) -> float:
            return fmean(fmean(r[key] for r in run) for run in last)

        lines.append(
            f"| {label} | {', '.join(f'{e:.3f}' for e in ends)} | {fmean(ends):.3f} ± {pstdev(ends):.3f} | "
            f"{mean('rollout/reward/mean'):.3f} | {mean('mismatch/kl'):.1e} | "
            f"{max(r['mismatch/logprob_abs_diff_max'] for run in last for r in run):.2f} | "
            f"{mean('routing/agreement'):.3f} |"
        )
    return "\n".join(lines)


def mismatch_table(runs: dict[str, list[list[dict[str, float]]]]) -> str:
    """Markdown: for each label, the mismatch at step 1, and its mean over all later steps."""
    columns: tuple[tuple[str, str, Callable[[Sequence[float]], str]], ...] = (
        ("routes that differ", "routing/agreement", lambda v: f"{100 * (1 - fmean(v)):.2f} %"),
        ("KL (k3)", "mismatch/kl", lambda v: f"{fmean(v):.1e}"),
        ("F(2)", "mismatch/extreme_frac", lambda v: f"{100 * fmean(v):.2f} %"),
        ("mean gap", "mismatch/logprob_abs_diff", lambda v: f"{fmean(v):.4f}"),
        ("largest gap", "mismatch/logprob_abs_diff_max", lambda v: f"{max(v):.2f}"),
        ("ESS", "mismatch/ess", lambda v: f"{fmean(v):.4f}"),
    )
    lines = [f"| run | {' | '.join(name for name, _, _ in columns)} |", "|---" * (1 + len(columns)) + "|"]
    for label, seeds in runs.items():
        steps = [r for run in seeds for r in run if "mismatch/kl" in r]
        parts = [r for r in steps if r["step"] == 1], [r for r in steps if r["step"] > 1]
        cells = [", ".join(show([r[key] for r in part]) for part in parts if part) for _, key, show in columns]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+", help="LABEL=DIR[,DIR...]")
    arguments = parser.parse_args()
    runs = {}
    for text in arguments.runs:
        label, _, directories = text.partition("=")
        runs[label] = [rows(Path(d)) for d in directories.split(",")]
    draw(runs, arguments.out)
    print(table(runs), mismatch_table(runs), sep="\n\n")


if __name__ == "__main__":
    main()
