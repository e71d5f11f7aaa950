"""Whether episodes of several turns are learnt, beside controls and ceilings: docs/start/episodes.md.

- `guess`: docs/examples/guess, from random weights. `true`: "higher" and "lower" are right; `random`: drawn at random.
- `calculator`: docs/examples/calculator, from a warm-up that calls the calculator in some rows. `true`: its answers;
  `random`: numbers drawn at random; `forbidden`: a call ends the episode without a reward.

Each run is the real pipeline with one trainer rank, on one core; as many run side by side as there are cores. Each seed
has other random weights, prompts in another order and other samples; those of `calculator` have one warm-up. Accuracy
is greedy, over the evaluation set.

    python benchmarks/episode_study.py [--quick] [--tasks guess,calculator] [--seeds 3] [--out DIR] [--docs]

What is in DIR is not run again: a study that was interrupted goes on. --docs puts tables and pictures into docs/.
Goals: every seed ends above what is possible without the environment's answers, where that is known, and above every
control.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from algorithms import ROOT, Study, Task, run_all
from algorithms_report import last, put_into, spread
from figures import END as FIGURES_END
from figures import begin
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from miles_like.report.plots import BLUE, DPI, FAINT, INK, ORANGE, VERMILION

PAGE = ROOT / "docs" / "start" / "episodes.md"
Runs = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    config: Path
    held_out: str  # the evaluation set
    steps: int
    environments: Mapping[str, str]  # of each variant, the first of which can be learnt: name of its class
    deaf: float | None  # the best accuracy without the environment's answers, where it is known
    ceiling: float  # with them
    settings: tuple[str, ...] = ()

    @property
    def lines(self) -> Mapping[str, float]:
        return {"with the answers": self.ceiling} | ({} if self.deaf is None else {"without": self.deaf})

    def task(self, variant: str, seed: int) -> Task:
        name = f"rollout.environment={self.config.parent}/{self.environments[variant]}"
        return Task(f"{variant}-{seed}", (name, f"seed={seed}", f"model.make.seed={seed}", *self.settings))


EXAMPLES = ROOT / "docs" / "examples"
DEMONSTRATIONS = {
    "guess": Demonstration(
        config=EXAMPLES / "guess" / "guess.toml",
        held_out="numbers",
        steps=100,
        environments={"true": "game.py:Game", "random": "game.py:Deaf"},
        deaf=3 / 16,
        ceiling=7 / 16,
    ),
    "calculator": Demonstration(
        config=EXAMPLES / "calculator" / "calculator.toml",
        held_out="heldout",
        steps=40,
        environments={
            "true": "calculator.py:Calculator",
            "random": "calculator.py:Broken",
            "forbidden": "calculator.py:Forbidden",
        },
        deaf=None,
        ceiling=1.0,
        settings=("model.make.seed=0",),
    ),
}


def table(found: Mapping[str, Runs]) -> str:
    evaluated = [step for step, _, _ in next(iter(found.values()))[0]["accuracy"]]
    lines = [
        "| answers | seed | " + " | ".join(f"step {step}" for step in evaluated) + " | reward of the last 10 steps |"
    ]
    lines.append("|---" * (len(evaluated) + 3) + "|")
    for variant, runs in found.items():
        for seed, run in enumerate(runs):
            accuracies = " | ".join(f"{value:.3f}" for *_, value in run["accuracy"])
            rewards = [value for *_, value in run["reward"][-10:]]
            lines.append(f"| {variant} | {seed} | {accuracies} | {sum(rewards) / len(rewards):.3f} |")
    return "\n".join(lines)


def draw(name: str, of: Demonstration, found: Mapping[str, Runs], path: Path) -> None:
    """Greedy accuracy of each run as points, mean reward of its samples as a line."""
    figure = Figure(figsize=(6.0, 3.2), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    for colour, (variant, runs) in zip((BLUE, VERMILION, ORANGE), found.items(), strict=False):
        for seed, run in enumerate(runs):
            label = f"answers: {variant}" if seed == 0 else None
            ax.plot(*zip(*((x, y) for x, _, y in run["reward"]), strict=True), color=colour, alpha=0.45, linewidth=0.9)
            ax.plot(*zip(*((x, y) for x, _, y in run["accuracy"]), strict=True), "o", color=colour, label=label)
    for label, value in of.lines.items():
        ax.axhline(value, color=FAINT, linewidth=0.8, linestyle="--")
        ax.annotate(
            f"best {label}: {value:.3g}", (0, value), (2, 2), textcoords="offset points", fontsize=7, color=FAINT
        )
    ax.set_xlabel("step", fontsize=8, color=INK)
    ax.set_title(f"{name}: greedy accuracy (points), reward of samples (lines)", loc="left", fontsize=9, color=INK)
    ax.legend(fontsize=7, frameon=False)
    ax.tick_params(labelsize=7, colors=FAINT)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    figure.savefig(path)


def study(name: str, out: Path, seeds: int, steps: int, *, docs: bool) -> dict[str, Any]:
    of = DEMONSTRATIONS[name]
    home = out / name
    home.mkdir(parents=True, exist_ok=True)
    made = Study(home=home, steps=steps, base=of.config, held_out=of.held_out)
    tasks = [of.task(variant, seed) for seed in range(seeds) for variant in of.environments]
    done = run_all(made, tasks, home.with_suffix(".json"), sorted(os.sched_getaffinity(0)))
    found = {v: [done[of.task(v, seed).name] for seed in range(seeds)] for v in of.environments}
    print(text := table(found))
    draw(name, of, found, out / f"{name}.png")
    if docs:
        draw(name, of, found, ROOT / "docs" / "images" / f"episodes_{name}.png")
        put_into(PAGE, "", begin(f"benchmarks/episode_study.py:{name}"), FIGURES_END, text)
    ends = {variant: [last(run) or 0.0 for run in runs] for variant, runs in found.items()}
    for variant, values in ends.items():
        print(f"{name}, answers {variant}: {spread(values, '.3f')}")
    learnt, *controls = ends.values()
    return {
        f"{name}_least": min(learnt),
        f"{name}_most_of_controls": max(value for values in controls for value in values),
        f"{name}_holds": min(learnt) > max(of.deaf or 0.0, *(v for values in controls for v in values)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 steps of one seed")
    parser.add_argument("--tasks", default=",".join(DEMONSTRATIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "study" / "episodes")
    parser.add_argument("--docs", action="store_true", help=f"put tables and pictures into {PAGE.relative_to(ROOT)}")
    given = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in given.tasks.split(","):
        seeds, steps = (1, 4) if given.quick else (given.seeds, DEMONSTRATIONS[name].steps)
        out = given.out.resolve() / "quick" if given.quick else given.out.resolve()
        figures |= study(name, out, seeds, steps, docs=given.docs)
    holds = all(value for key, value in figures.items() if key.endswith("_holds"))
    print(json.dumps({"name": "episode_study", "figures": figures, "goals": {}, "holds": holds}))


if __name__ == "__main__":
    main()
