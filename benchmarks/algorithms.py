"""Every preset on the tiny task, from the same checkpoint, with several seeds: docs/studies/algorithms.md.

Each run is the real pipeline with one trainer rank, on one core; as many run side by side as there are cores. The
checkpoint is made once. A rollout is trained in 4 optimizer steps, so that ratios leave 1 and what is done with them
shows. All presets have the same learning rate, prompts in the same order for the same seed, and no other setting of
their own than the preset's.

    python benchmarks/algorithms.py [--quick] [--presets grpo,dapo] [--seeds 3] [--steps N] [--out FILE.json] [--docs]

What is in FILE.json is not run again: a study that was interrupted goes on. Beside it lie FILE.md, the table, and the
runs' logs and metrics; --docs also puts the table and the pictures into docs/. Goal: no run ends early.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from algorithms_report import write_study
from rich.console import Console

from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.config.sections.algorithm import PRESETS
from miles_like.run import assemble

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = ("parallel.dp=1", "parallel.ep=1", "train.steps_per_rollout=4", "train.on_nonfinite=skip")
EVALUATIONS = 5  # after so many equal parts of a run
GOALS = {"ended_early_max": 0}


@dataclass(frozen=True, slots=True)
class Task:
    """One run."""

    name: str
    settings: tuple[str, ...]  # over those of the study's configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    home: Path  # of the runs, with their checkpoint
    steps: int  # rollouts
    more: tuple[str, ...] = ()  # settings, of the checkpoint too
    base: Path = ROOT / "configs" / "tiny.toml"
    held_out: str = "heldout"  # the evaluation set

    def configured(self, task: Task) -> RunConfig:
        every = f"eval.every={max(1, self.steps // EVALUATIONS)}"
        settings = [*task.settings, f"train.steps={self.steps}", every, *self.more]
        return load_config(self.base, settings)

    def run(self, task: Task) -> dict[str, Any]:
        """The task's figures; `ended` is None, or the sentence with which it ended early."""
        from miles_like.nodes.session import start_ray
        from miles_like.run.setup.model_plan import model_plan
        from miles_like.run.train import train

        config, run_dir = self.configured(task), self.home / task.name
        shutil.rmtree(run_dir, ignore_errors=True)  # of a study that was interrupted
        run_dir.mkdir(parents=True)
        ended, began, worked = None, time.perf_counter(), cpu_seconds()
        with (run_dir / "console.log").open("w") as log:
            console = Console(file=log, width=160)
            start_ray(None)
            root = assemble.staged(config, run_dir, console, None)
            try:
                train(model_plan(config, run_dir, root / "hf", root / "megatron"), console, resume=False)
            except RuntimeError as e:  # what a run says of itself when it cannot go on
                ended = str(e)
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        took = {"wall_s": time.perf_counter() - began, "cpu_s": cpu_seconds() - worked}
        return {"ended": ended, **took, **figures(run_dir / "metrics.jsonl", self.held_out)}


def cpu_seconds() -> float:
    """Of this process and all that it started and has not ended yet; Ray's workers live as long as it does."""
    me = psutil.Process()
    times = [p.cpu_times() for p in (me, *me.children(recursive=True))]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


def figures(path: Path, held_out: str) -> dict[str, Any]:
    """Of one run, from its metrics.jsonl."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    tokens, curve, entropies, sampled = 0.0, [], [], []
    for row in rows:
        tokens += row.get("rollout/tokens") or 0.0
        if (accuracy := row.get(f"eval/{held_out}/avg@1")) is not None:
            curve.append([row["step"], tokens, accuracy])
        if (reward := row.get("rollout/reward/mean")) is not None:
            sampled.append([row["step"], tokens, reward])
        if (entropy := row.get("train/entropy")) is not None:
            entropies.append([row["step"], tokens, entropy])
    norms = _of(rows, "train/grad_norm")
    clipped = [a + b for a, b in zip(_of(rows, "train/clip_frac/low"), _of(rows, "train/clip_frac/high"), strict=False)]
    return {
        "accuracy": curve,  # [rollouts, sampled tokens, greedy accuracy]
        "entropy": entropies,  # [rollouts, sampled tokens, nats/token]
        "reward": sampled,  # [rollouts, sampled tokens, mean reward]
        "tokens": tokens,
        "grad_norm_median": statistics.median(norms) if norms else None,
        "grad_norm_max": max(norms, default=None),
        "kl_max": max(kls := _of(rows, "mismatch/kl"), default=None),
        "kl_mean": statistics.fmean(kls) if kls else None,
        "staleness_mean": statistics.fmean(_of(rows, "async/staleness/mean") or [0.0]),
        "staleness_max": max(_of(rows, "async/staleness/max"), default=0.0),
        "clip_frac": statistics.fmean(clipped) if clipped else None,
        "skipped": sum(_of(rows, "train/skipped")),
        "reward_last": sampled[-1][2] if sampled else None,
    }


def _of(rows: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [v for row in rows if isinstance(v := row.get(key), int | float) and math.isfinite(v)]


# many runs


def _work(core: int, study: Study, tasks: Any, found: Any) -> None:
    """A process of one core: tasks one after the other, with one Ray."""
    os.sched_setaffinity(0, {core})
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes started from here
    try:
        while (task := tasks.get()) is not None:
            try:
                found.put((task, study.run(task)))
            except ValueError as e:  # a configuration that is refused; the other presets' are not
                found.put((task, str(e)))
    finally:
        assemble.shut_down()
        found.put((None, {}))


def run_all(study: Study, tasks: Sequence[Task], out: Path, cores: Sequence[int]) -> dict[str, Any]:
    """Runs what `out` does not have; every result is written at once."""
    done: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    left = [t for t in tasks if t.name not in done]
    if not left:
        return done
    _make_checkpoint(study, left[0])
    context = multiprocessing.get_context("spawn")
    waiting, found = context.Queue(), context.Queue()
    for task in (*left, *(None for _ in cores)):
        waiting.put(task)
    workers = [context.Process(target=_work, args=(core, study, waiting, found)) for core in cores]
    for worker in workers:
        worker.start()
    running = len(workers)
    while running:
        task, result = found.get()
        if task is None:
            running -= 1
            continue
        if isinstance(result, str):
            print(f"{task.name} was refused: {result}", flush=True)
            continue
        done[task.name] = result
        _write(out, done)
        last = f"{result['accuracy'][-1][2]:.3f}" if result["accuracy"] else "none"
        print(
            f"{task.name}: accuracy {last}, {result['tokens']:,.0f} tokens, {result['wall_s']:.0f} s "
            f"({result['cpu_s']:.0f} of the processor){'; ' + result['ended'] if result['ended'] else ''}",
            flush=True,
        )
    for worker in workers:
        worker.join()
    if missing := [t.name for t in tasks if t.name not in done]:
        sys.exit(f"{len(missing)} of {len(tasks)} runs gave nothing, first {missing[0]}: see above, then run again")
    return done


def _make_checkpoint(study: Study, task: Task) -> None:
    """Before there are two that would make it."""
    from miles_like.nodes.session import start_ray

    (study.home / "checkpoint").mkdir(parents=True, exist_ok=True)
    try:
        start_ray(None)
        assemble.staged(study.configured(task), study.home / "checkpoint", Console(stderr=True), None)
    finally:
        assemble.shut_down()


def _write(out: Path, done: Mapping[str, Any]) -> None:
    part = out.with_suffix(".part")
    part.write_text(json.dumps(done, indent=1))
    part.replace(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2 rollouts of 2 presets from random weights")
    parser.add_argument("--presets", default=",".join(PRESETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30, help="rollouts of a run, of 4 optimizer steps each")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "study" / "study.json")
    parser.add_argument("--docs", action="store_true", help="put table and pictures into docs/")
    given = parser.parse_args()
    presets, seeds = given.presets.split(","), given.seeds
    if unknown := set(presets) - set(PRESETS):
        parser.error(f"no preset called {', '.join(sorted(unknown))}; there are {', '.join(PRESETS)}")
    out: Path = given.out.resolve()
    study = Study(home=out.parent / out.stem, steps=given.steps)
    if given.quick:
        presets, seeds, out = presets[:2], 1, out.with_name("quick.json")
        out.unlink(missing_ok=True)
        study = Study(home=out.parent / "quick", steps=2, more=("model.make.max_steps=0",))
    out.parent.mkdir(parents=True, exist_ok=True)
    tasks = [
        Task(f"{preset}-{seed}", (*SETTINGS, f"algorithm.name={preset}", f"seed={seed}"))
        for seed in range(seeds)
        for preset in presets
    ]
    done = run_all(study, tasks, out, sorted(os.sched_getaffinity(0)))
    found = {preset: [done[f"{preset}-{seed}"] for seed in range(seeds)] for preset in presets}
    written = write_study(found, out, ROOT / "docs" if given.docs else None)
    early = sum(run["ended"] is not None for runs in found.values() for run in runs)
    written["ended_early"] = early
    print(json.dumps({"name": "algorithms", "figures": written, "goals": GOALS, "holds": not early}))


if __name__ == "__main__":
    main()
