"""What stale tokens do to learning: staleness 0, 1, 2, 4, 8 with the plain clipped loss and with the decoupled one.

Each run is the real pipeline on the tiny task with one trainer rank, on one core, from one checkpoint; as many run side
by side as there are cores. It runs in lockstep, so every token is exactly as stale as configured, but for those
of the first steps. A rollout is one optimizer step, so a staleness of k is k optimizer steps. Plain: the old policy is
what sampled the tokens, and the clip bounds also limit what is stale. Decoupled: the old policy is the trainer before
the step, and each token weighs p_old / p_rollout.

    python benchmarks/staleness_study.py [--quick] [--staleness 0,1,2,4,8] [--seeds 3] [--steps N] [--out FILE] [--docs]

What is in FILE (json) is not run again: a study that was interrupted goes on. --docs puts the table into
docs/studies/asynchrony.md. Goals: no run ends early, and no token is staler than configured.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from algorithms import ROOT, Study, Task, run_all
from algorithms_report import last, mean, put_into, spread
from figures import END as FIGURES_END
from figures import begin

SETTINGS = (
    *("parallel.dp=1", "parallel.ep=1", "train.groups_per_step=32", "train.samples_per_group=8"),
    *("optimizer.lr=4e-4", "train.on_nonfinite=skip", "buffer.lockstep=true"),
)
LOSSES = {"plain": "grpo", "decoupled": "decoupled_ppo"}  # presets that differ in their loss alone
HEAD = (
    *("staleness", "loss", "seeds", "accuracy before", "after", "staleness seen, mean / largest"),
    *("largest KL to the rollout", "mean KL", "clipped", "gradient norm, largest / median", "skipped"),
)
BEGIN, END = begin("benchmarks/staleness_study.py"), FIGURES_END
SECTION = f"""
## What staleness does to learning

`benchmarks/staleness_study.py`: the tiny task, 32 prompts x 8 samples, 80 steps of one optimizer step each, learning
rate 4e-4, in lockstep, so that after the first steps every token is exactly as stale as configured. "Plain" is
`algorithm.name = "grpo"`: with one step a rollout the old policy of its clipped loss is what sampled the tokens, and
its bounds also limit staleness. "Decoupled" is `"decoupled_ppo"`: the old policy is the trainer before the step, and
each token weighs `p_old / p_rollout`, 0 above 5; with one step a rollout its clip bounds do nothing. Accuracy is
greedy, over 600 held-out problems, which alone has a standard error of 0.02; ± is the standard deviation over seeds.

{BEGIN}
{END}
"""


def task(loss: str, staleness: int, seed: int) -> Task:
    own = (f"algorithm.name={LOSSES[loss]}", f"buffer.max_staleness={staleness}", f"seed={seed}")
    return Task(f"{loss}-{staleness}-{seed}", (*SETTINGS, *own))


def row(loss: str, staleness: int, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    early = sum(r["ended"] is not None for r in runs)
    return [
        str(staleness),
        loss,
        str(len(runs)),
        spread([r["accuracy"][0][2] if r["accuracy"] else None for r in runs[:1]], ".3f"),
        spread([last(r) for r in runs], ".3f") + (f" ({early} of {len(runs)} ended early)" if early else ""),
        f"{mean([r['staleness_mean'] for r in runs]):.2f} / {max(r['staleness_max'] for r in runs):.0f}",
        f"{max(r['kl_max'] or 0.0 for r in runs):.1e}",
        f"{mean([r['kl_mean'] for r in runs]):.1e}",
        f"{mean([r['clip_frac'] for r in runs]):.2%}",
        f"{max(r['grad_norm_max'] / r['grad_norm_median'] for r in runs if r['grad_norm_median']):.1f}",
        f"{sum(r['skipped'] for r in runs):.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 rollouts at 0 and 2, plain, from random weights")
    parser.add_argument("--staleness", default="0,1,2,4,8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80, help="rollouts of a run, of one optimizer step each")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "study" / "staleness.json")
    parser.add_argument("--docs", action="store_true", help="put the table into docs/studies/asynchrony.md")
    given = parser.parse_args()
    levels, losses, seeds = [int(k) for k in given.staleness.split(",")], list(LOSSES), given.seeds
    out: Path = given.out.resolve()
    study = Study(home=out.parent / out.stem, steps=given.steps)
    if given.quick:
        levels, losses, seeds, out = [0, 2], losses[:1], 1, out.with_name("staleness_quick.json")
        out.unlink(missing_ok=True)
        study = Study(home=out.parent / out.stem, steps=4, more=("model.make.max_steps=0",))
    out.parent.mkdir(parents=True, exist_ok=True)
    ways = [(loss, k) for k in levels for loss in losses]
    tasks = [task(loss, k, seed) for seed in range(seeds) for loss, k in ways]
    done = run_all(study, tasks, out, sorted(os.sched_getaffinity(0)))
    found = {(loss, k): [done[task(loss, k, seed).name] for seed in range(seeds)] for loss, k in ways}
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    lines += [f"| {' | '.join(row(loss, k, runs))} |" for (loss, k), runs in found.items()]
    print("\n".join(lines))
    if given.docs:
        put_into(ROOT / "docs" / "studies" / "asynchrony.md", SECTION, BEGIN, END, "\n".join(lines))
    every = [(k, run) for (_, k), runs in found.items() for run in runs]
    figures = {f"accuracy_{loss}_{k}": mean([last(run) for run in runs]) for (loss, k), runs in found.items()}
    figures["ended_early"] = sum(run["ended"] is not None for _, run in every)
    figures["beyond_the_bound"] = sum(run["staleness_max"] > k for k, run in every)
    goals = {"ended_early_max": 0, "beyond_the_bound_max": 0}
    holds = not (figures["ended_early"] or figures["beyond_the_bound"])
    print(json.dumps({"name": "staleness_study", "figures": figures, "goals": goals, "holds": holds}))


if __name__ == "__main__":
    main()
