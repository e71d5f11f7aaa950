"""Three studies of long-tailed answers by simulation: docs/plan/long_tails.md.

    python benchmarks/tail_studies.py longest|abort|packing [--steps 16] [--write]

"longest": the longest of a group's K samples delays its group, and the longest of all delays a synchronous step.
"abort": more groups, or more samples of a group, are sampled than needed, and those that are late are aborted.
"packing": padded and packed training steps; samples that continue across publications.

All simulate configs/qwen3_30b_a3b.toml with trainer and servers on separate GPUs, 2048 samples a step, and the
assumptions ASSUMED, which are stated, not measured: 8 servers of 2 H100 each with BF16 weights, log-normal lengths.
With --write a study puts its table and its picture into the page.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from figures import ROOT, add_write, write_block
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from miles_like.config.load import load_config
from miles_like.run.simulation_inputs import loop_settings, read_assumptions
from miles_like.simulation.figures import SimulationFigures, figures_of
from miles_like.simulation.gantt import write_gantts
from miles_like.simulation.inputs.lengths import DrawnAnswers, Purpose, stream
from miles_like.simulation.simulate import Outcome, simulate

CONFIG = ROOT / "configs" / "qwen3_30b_a3b.toml"
PAGE = ROOT / "docs" / "plan" / "long_tails.md"
IMAGES = ROOT / "docs" / "images"
BLUE, ORANGE, GREEN, VERMILION, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#C8C8C8"
SETTINGS = {
    "cluster.nodes": 4,
    "cluster.colocate": "false",
    "replay.mode": "off",
    "train.groups_per_step": 128,
    "train.samples_per_group": 16,
    "train.max_tokens_per_rank": 20480,
    "rollout.max_new_tokens": 16384,
    "checkpoint.every": 0,
}
# of a server: reading 61 GB of weights and 96 KiB of keys and values a token from 2 x 3.35 TB/s at 60 %, 6.6 GFLOP a
# token at 40 % of 2 x 990 TFLOP/s. Of the trainer: 26 GFLOP a token, recomputation included, at 30 % of 4 x 990 TFLOP/s
ASSUMED: dict[str, Any] = {
    "engine": {"step_s": 0.015, "token_s": 8e-6, "context_s": 2.4e-8, "prefill_s": 8e-6, "prefill_tokens": 8192},
    "train": {"token_s": 2.2e-5},
    "publish": {"seconds": 3.0, "pause_s": 1.0},
    "lengths": {"kind": "lognormal", "mean": 2500, "sigma": 1.0, "of_prompt": 0.5, "prompt_tokens": 200},
}


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    outcome: Outcome
    figures: SimulationFigures

    @property
    def step_s(self) -> float:
        return self.figures["step_s"]["mean"]

    def seconds(self, *states: str) -> float:
        """Of a step, in these states of the trainer."""
        return self.step_s * sum(self.figures["trainer"].get(state, 0.0) for state in states)

    @property
    def tokens_mean(self) -> float:
        """Of the samples that were trained."""
        rows = self.outcome.state.rows
        return sum(r.tokens for r in rows) / sum(r.samples for r in rows)

    @property
    def staleness(self) -> float:
        return sum(int(k) * part for k, part in self.figures["staleness"].items())


def simulated(steps: int, settings: Mapping[str, Any], assumed: Mapping[str, Any] | None = None) -> Case:
    config = load_config(CONFIG, [f"{k}={v}" for k, v in (SETTINGS | {"train.steps": steps} | dict(settings)).items()])
    assumptions = read_assumptions(ASSUMED | dict(assumed or {}))
    loop = loop_settings(config, assumptions)
    outcome = simulate(loop, assumptions, DrawnAnswers(lengths=assumptions.lengths, limit=loop.limit))
    return Case(outcome, figures_of(outcome))


def free(k: int, **more: Any) -> dict[str, Any]:
    """Asynchronous with staleness k; 0: synchronous."""
    return {"buffer.max_staleness": k, "buffer.lockstep": "false"} | more


# ---- the longest of K


def longest_of(samples: int, groups: int = 4000) -> float:
    """Mean length of a group's longest answer over the mean length of an answer."""
    limit = int(str(SETTINGS["rollout.max_new_tokens"]))
    source = DrawnAnswers(lengths=read_assumptions(ASSUMED).lengths, limit=limit)
    drawn = [source.draw(stream(1, Purpose.LENGTHS, g), samples).lengths for g in range(groups)]
    return statistics.fmean(map(max, drawn)) / statistics.fmean(n for group in drawn for n in group)


def study_longest(steps: int, write: bool) -> list[str]:
    head = ["K, of 2048 samples", "longest of a group / mean", "`k`", "seconds a step", "of it waiting for samples"]
    head += ["of that for the last 10 %", "servers idle", "trainer idle"]
    rows, shown = [], []
    for samples in (2, 8, 32):
        for k in (0, 1, 2):
            groups = {"train.samples_per_group": samples, "train.groups_per_step": 2048 // samples}
            case = simulated(steps, free(k) | groups)
            waits = case.figures["waits_s"]
            row = [str(samples), f"{longest_of(samples):.2f}"] if not k else ["", ""]
            row += [str(k), f"{case.step_s:.0f}", f"{sum(waits.values()):.0f}", f"{waits['tail']:.0f}"]
            rows.append([*row, f"{case.figures['servers_idle']:.0%}", f"{case.figures['trainer_idle']:.0%}"])
            if samples == 8:
                shown.append((f"max_staleness = {k}: {case.step_s:.0f} s a step", case.outcome))
    if write:
        write_gantts(shown, IMAGES / "tails_longest.png", steps=3)
    return markdown(head, rows)


# ---- over-sampling and abort


def study_abort(steps: int, write: bool) -> list[str]:
    head = [
        "sampled beyond the need",
        "seconds a step",
        "sampled tokens that are trained",
        "tokens of a trained answer",
    ]
    head += ["servers idle", "trained samples/s"]
    cases: list[tuple[str, Case]] = []
    for share in (0.0, 0.125, 0.25, 0.5, 1.0):
        cases.append((f"{share:.1%} of the groups", simulated(steps, free(0) | {"buffer.over_sampling": share})))
    for spare in (2, 4, 8, 16):
        cases.append((f"{spare} of 16 samples of each group", simulated(steps, free(0), {"spare_samples": spare})))
    rows = [
        [
            name,
            f"{c.step_s:.0f}",
            f"{c.figures['goodput']['useful']:.0%}",
            f"{c.tokens_mean:.0f}",
            f"{c.figures['servers_idle']:.0%}",
            f"{c.figures['goodput']['samples_per_s']:.1f}",
        ]
        for name, c in cases
    ]
    if write:
        picture_of_aborts([c for _, c in cases[:5]], [cases[0][1], *(c for _, c in cases[5:])])
    return markdown(head, rows)


def picture_of_aborts(groups: Sequence[Case], samples: Sequence[Case]) -> None:
    figure = Figure(figsize=(7.2, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    times, lengths = figure.subplots(1, 2)
    for cases, beyond, colour, name in (
        (groups, (0, 12.5, 25, 50, 100), BLUE, "groups"),
        (samples, (0, 12.5, 25, 50, 100), VERMILION, "samples of a group"),
    ):
        times.plot(beyond, [c.step_s for c in cases], color=colour, marker="o", label=name)
        lengths.plot(beyond, [c.tokens_mean for c in cases], color=colour, marker="o", label=name)
    for ax, title in ((times, "seconds a step"), (lengths, "mean tokens of a trained answer")):
        ax.set_title(title, loc="left", fontsize=10, fontweight="bold")
        ax.set_xlabel("% sampled beyond the need, the late ones aborted", fontsize=9)
        ax.set_ylim(bottom=0)
        ax.tick_params(labelsize=8)
        ax.grid(axis="y", color="#E4E4E4")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    times.legend(fontsize=8, frameon=False)
    figure.savefig(IMAGES / "tails_abort.png")


# ---- packing and partial rollouts

PADDED = {"train": {"token_s": 2.2e-5, "packing": "padded"}}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "synchronous, padded": (free(0), PADDED),
    "synchronous, packed": (free(0), {}),
    "partial, old tokens masked (`k = 0`, 50 % more groups)": (
        free(0, **{"buffer.over_sampling": 0.5, "buffer.old_tokens": "mask"}),
        {},
    ),
    "partial, `k = 1`, retract": (free(1), {}),
    "partial, `k = 1`, in place": (free(1, **{"publish.pause_mode": "in_place"}), {}),
    "whole, `k = 1`, lockstep": ({"buffer.max_staleness": 1, "buffer.lockstep": "true"}, {}),
}


def study_packing(steps: int, write: bool) -> list[str]:
    head = ["", "seconds a step", "of it training", "waiting for samples", "trainer idle", "servers idle"]
    head += ["sampled tokens that are trained", "mean staleness of a token", "trained tokens/s"]
    cases = {name: simulated(steps, settings, assumed) for name, (settings, assumed) in VARIANTS.items()}
    rows = [
        [
            name,
            f"{c.step_s:.0f}",
            f"{c.seconds('train'):.0f}",
            f"{c.seconds('samples', 'settle'):.0f}",
            f"{c.figures['trainer_idle']:.0%}",
            f"{c.figures['servers_idle']:.0%}",
            f"{c.figures['goodput']['useful']:.0%}",
            f"{c.staleness:.2f}",
            f"{c.figures['goodput']['tokens_per_s']:.0f}",
        ]
        for name, c in cases.items()
    ]
    if write:
        picture_of_packing(cases)
    return markdown(head, rows)


def picture_of_packing(cases: Mapping[str, Case]) -> None:
    figure = Figure(figsize=(7.2, 3.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    ax, left = figure.subplots(), [0.0] * len(cases)
    names = [name.replace("`", "") for name in cases]
    for label, states, colour in (
        ("training", ("train",), ORANGE),
        ("publication", ("publish",), GREEN),
        ("waiting for samples", ("samples", "settle"), GREY),
    ):
        seconds = [c.seconds(*states) for c in cases.values()]
        ax.barh(names, seconds, left=left, color=colour, label=label, height=0.7)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    ax.invert_yaxis()
    ax.set_xlabel("seconds of the trainer in a step", fontsize=9)
    ax.tick_params(labelsize=8)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.legend(fontsize=8, frameon=False)
    figure.savefig(IMAGES / "tails_packing.png")


# ----


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


STUDIES: dict[str, Callable[[int, bool], list[str]]] = {
    "longest": study_longest,
    "abort": study_abort,
    "packing": study_packing,
}


@functools.cache
def console() -> Console:
    return Console(width=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--steps", type=int, default=16)
    add_write(parser)
    given = parser.parse_args()
    lines = STUDIES[given.study](given.steps, given.write)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    table = Table(*cells[0])
    for row in cells[2:]:
        table.add_row(*row)
    console().print(table)
    if given.write:
        write_block(PAGE, f"benchmarks/tail_studies.py:{given.study}", lines)


if __name__ == "__main__":
    main()
