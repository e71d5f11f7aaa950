"""Samples a second of the asynchronous loop (buffer.max_staleness = 2) beside the synchronous one (0), on two cores.

Both are the whole command, scripts/run_deepseek.py, on a task with long-tailed lengths that the policy makes itself
(long_tail.py): one trainer rank, pinned to one core, and one rollout server, pinned to the other one together with the
driver and Ray. The loops take turns, and which is first changes with each seed. Counted are the steps after the first
few, without evaluations; gains are of pairs with one seed, and their median is held to the goal. Staleness is that of
every token that was trained: the version that trained it less the one that sampled it.

Goals: async / sync >= 1.3, and final accuracies no further apart than two standard errors of their difference.
--quick: one short pair on a checkpoint whose weights are crafted to have such lengths and which learns nothing, so
without the second goal.

    python benchmarks/async.py [--quick] [--seeds 3] [--steps 40] [--home DIR]

DIR keeps the checkpoint and the runs; a run that is whole there is not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from figures import ROOT, add_write, finish
from long_tail import crafted_config, warmed_up_config
from rich.console import Console
from rich.table import Table
from vs_trl import pin

from miles_like.config.load import dump_config

LOOPS = {"sync": 0, "async": 2}  # name -> buffer.max_staleness
GOALS = {"gain_min": 1.3, "accuracy_apart_max": 2.0}  # the latter in standard errors
WARM = 4  # steps that are not counted: the asynchronous loop is ahead by then
RANK = "ray::_Rank"  # how Ray names a trainer rank's process


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one command left."""

    rows: Sequence[Mapping[str, Any]]  # of metrics.jsonl; row s is written after step s
    lengths: Sequence[Sequence[int]]  # of each step: tokens of the answers trained
    staleness: Counter[int]  # weight versions -> tokens trained

    @property
    def samples_per_s(self) -> float:
        first, last = WARM, len(self.rows) - 2  # the last row's clock is after an evaluation
        samples = sum(len(step) for step in self.lengths[first:last])
        return samples / float(self.rows[last]["wall_s"] - self.rows[first]["wall_s"])

    @property
    def accuracy(self) -> float:
        (key,) = [k for k in self.rows[-1] if k.startswith("eval/heldout/avg@")]
        return float(self.rows[-1][key])

    def median(self, key: str) -> float:
        return float(statistics.median(row[key] for row in self.rows[1 + WARM :]))


def run(config: Path, run_dir: Path, settings: Sequence[str]) -> Run:
    """One command from its start to its end, or what it left before."""
    if not (run_dir / "report.html").exists():
        shutil.rmtree(run_dir, ignore_errors=True)  # of a benchmark that was interrupted
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(ROOT / "scripts" / "run_deepseek.py"), "--config", str(config)]
        command += ["--run-dir", str(run_dir), *(x for s in settings for x in ("--set", s))]
        log = run_dir.with_suffix(".log")
        with log.open("w") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            pin_sides(process, run_dir / "metrics.jsonl")
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode:
            sys.exit(f"{' '.join(command)} ended with {process.returncode}; {log} ends:\n{log.read_text()[-2000:]}")
    return read(run_dir)


def pin_sides(process: subprocess.Popen[bytes], metrics: Path) -> None:
    """Once the first row is written and all are up: the trainer rank to the last core, all others to the first."""
    while not (metrics.exists() and metrics.stat().st_size):
        if process.poll() is not None:
            return
        time.sleep(0.2)
    cores = sorted(os.sched_getaffinity(0))
    driver = psutil.Process(process.pid)
    everyone = [driver, *driver.children(recursive=True)]
    ranks = [p for p in everyone if " ".join(p.cmdline()).startswith(RANK)]
    assert len(ranks) == 1, f"{len(ranks)} processes are called {RANK}"
    pin(ranks, cores[-1])
    pin([p for p in everyone if p not in ranks], cores[0])


def read(run_dir: Path) -> Run:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lengths, staleness = [], Counter[int]()
    for step in range(1, len(rows)):
        with (run_dir / "rollouts" / f"step_{step}.jsonl").open() as lines:
            samples = [json.loads(line) for line in lines]
        lengths.append([s["tokens"] for s in samples])
        for s in samples:
            for version, start, end in s["versions"]:
                staleness[step - 1 - version] += end - start
    return Run(rows=rows, lengths=lengths, staleness=staleness)


def figures_of(runs: Mapping[str, Sequence[Run]]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, of in runs.items():
        figures[f"{name}_samples_per_s"] = statistics.median(r.samples_per_s for r in of)
        for phase in ("step", "rollout", "train", "publish"):
            figures[f"{name}_{phase}_s"] = statistics.median(r.median(f"perf/{phase}_s") for r in of)
        flat = [n for r in of for step in r.lengths for n in step]
        figures[f"{name}_tokens_mean"] = statistics.fmean(flat)
        figures[f"{name}_tokens_p99"] = statistics.quantiles(flat, n=100)[98]
        for part, where in (("first", slice(0, 5)), ("last", slice(-5, None))):
            means = [statistics.fmean(n for step in r.lengths[where] for n in step) for r in of]
            figures[f"{name}_tokens_mean_of_{part}_5"] = statistics.fmean(means)
        figures[f"{name}_accuracy"] = statistics.fmean(r.accuracy for r in of)
        if len(of) > 1:
            figures[f"{name}_accuracy_std"] = statistics.stdev(r.accuracy for r in of)
        tokens = sum((r.staleness for r in of), Counter[int]())
        for k in range(max(tokens) + 1):
            figures[f"{name}_tokens_of_staleness_{k}"] = tokens[k] / tokens.total()
    gains = [b.samples_per_s / a.samples_per_s for a, b in zip(runs["sync"], runs["async"], strict=True)]
    figures |= {"gain": statistics.median(gains), "gain_least": min(gains), "gain_most": max(gains)}
    if len(gains) > 1:
        error = math.sqrt(sum(figures[f"{name}_accuracy_std"] ** 2 for name in LOOPS) / len(gains))
        figures["accuracy_apart"] = abs(figures["async_accuracy"] - figures["sync_accuracy"]) / error
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--home", type=Path)
    given = parser.parse_args()
    seeds, steps = (1, 12) if given.quick else (given.seeds, given.steps)
    with tempfile.TemporaryDirectory() as scratch:
        home = (given.home or Path(scratch)).resolve()
        home.mkdir(parents=True, exist_ok=True)
        config = home / "config.toml"
        config.write_text(dump_config((crafted_config if given.quick else warmed_up_config)(home)))
        runs: dict[str, list[Run]] = {name: [] for name in LOOPS}
        for seed in range(seeds):
            for name in LOOPS if seed % 2 == 0 else reversed(LOOPS):
                own = [f"buffer.max_staleness={LOOPS[name]}", f"seed={seed}", f"train.steps={steps}"]
                runs[name].append(run(config, home / "runs" / f"{name}-{seed}", own))
    figures = figures_of(runs)
    table = Table("figure", *LOOPS, title="on two cores, the trainer's and the server's")
    for key in dict.fromkeys(k.removeprefix(f"{name}_") for k in figures for name in LOOPS if k.startswith(name)):
        table.add_row(key, *(f"{figures[k]:.3f}" if (k := f"{name}_{key}") in figures else "" for name in LOOPS))
    table.add_row("async / sync", "", f"{figures['gain']:.2f}")
    Console().print(table)
    goals = {k: v for k, v in GOALS.items() if k.rpartition("_")[0] in figures}
    holds = figures["gain"] >= GOALS["gain_min"] and figures.get("accuracy_apart", 0.0) <= GOALS["accuracy_apart_max"]
    finish("async", figures, goals, holds)


if __name__ == "__main__":
    main()
