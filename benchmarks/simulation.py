"""Measured runs of the tiny task beside their simulation, which is calibrated on the synchronous run alone.

`--measure` runs configs/tiny.toml with buffer.max_staleness 0, 1, 2 and 4 (the whole loop: two trainer ranks, one
server, the driver and Ray, on this machine's cores) and records them in docs/plan/simulation.json: of the synchronous
run the seconds of each phase, the lengths of its answers and how many cores its processes kept busy in each phase; of
every run the seconds from step to step and the idle shares of trainer and server. Two series: "tiny" as shipped, with
answers of up to 5 tokens, and "tails", a checkpoint crafted so that a few answers are much longer than the others
(long_tail.py). Run it while nothing else runs. Without it the recorded runs are compared.

Idle: the trainer, outside of `train` and `publish`; the server, while no request is in flight.

Goals: step time within 15 %, idle shares within 15 % or 0.05.

    python benchmarks/simulation.py [--measure] [--steps 25] [--write]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from figures import ROOT, add_write, finish, provenance
from long_tail import crafted_config
from rich.console import Console
from rich.table import Table

from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.config.load import dump_config, load_config
from miles_like.loop.feed import Feed
from miles_like.nodes.session import start_ray
from miles_like.run import assemble
from miles_like.run import train as train_module
from miles_like.run.model_plan import model_plan
from miles_like.simulate_command import loop_settings, read_assumptions
from miles_like.simulation.calibration import read_run
from miles_like.simulation.figures import SimulationFigures, figures_of
from miles_like.simulation.inputs.lengths import RecordedAnswers
from miles_like.simulation.measured import MeasuredRun, MeasuredSeries, errors, read_series
from miles_like.simulation.simulate import simulate
from rollout.sglang.client import SGLangClient

RECORD = ROOT / "docs" / "plan" / "simulation.json"
TINY = ROOT / "configs" / "tiny.toml"
STALENESS = (0, 1, 2, 4)
FIRST = 6  # the first publication that counts: every loop is as far ahead as it may be by then
GOALS = {"step_error_max": 0.15, "idle_error_max": 0.15}
POINTS = 0.05  # shares of idle time that differ by less are equal
OURS = {"eval.every": 0, "eval.max_prompts": 8, "mismatch.checksums_every": 0, "mismatch.check_every": 0}
TAILS = {"train.groups_per_step": 32, "rollout.max_new_tokens": 308, "precision.format": "bf16", "precision.qat": False}
SERIES: dict[str, dict[str, Any]] = {"tiny": OURS, "tails": OURS | TAILS}
ROLES = {"ranks": "ray::_Rank", "servers": "rollout.embedded.server"}  # part of a command line -> role

Span = tuple[float, float]


@dataclass
class Watch:
    """What a run did, seen from the driver."""

    requests: list[Span] = field(default_factory=list)
    phases: dict[str, list[Span]] = field(default_factory=lambda: {"samples": [], "train": [], "publish": []})
    published: dict[int, float] = field(default_factory=dict)  # version -> time
    marks: list[tuple[float, str, dict[str, float]]] = field(default_factory=list)  # time, phase that ended, CPU s
    processes: dict[str, list[psutil.Process]] = field(default_factory=dict)

    def mark(self, phase: str) -> None:
        if not self.processes:
            self.processes = by_role()
        self.marks.append((time.perf_counter(), phase, {role: cpu(of) for role, of in self.processes.items()}))


def by_role() -> dict[str, list[psutil.Process]]:
    """This process and all that it started, which are up by now."""
    driver = psutil.Process()
    found: dict[str, list[psutil.Process]] = {"driver": [driver], "ranks": [], "servers": [], "ray": []}
    for process in driver.children(recursive=True):
        line = " ".join(process.cmdline())
        found[next((role for role, part in ROLES.items() if part in line), "ray")].append(process)
    return found


def cpu(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += float(times.user + times.system)
    return total


class Watching:
    """The functions of the loop, wrapped: each call is noted in `watch`, which is replaced for each run."""

    def __init__(self) -> None:
        self.watch = Watch()
        self._wrap(SGLangClient, "_generated", self._request)
        self._wrap(Feed, "take", self._phase("samples"))
        self._wrap(RayTrainer, "train", self._phase("train"))
        self._wrap(RayTrainer, "publish", self._phase("publish"))

    def _wrap(self, owner: type, name: str, note: Callable[[float, Mapping[str, Any]], None]) -> None:
        inner = getattr(owner, name)

        @functools.wraps(inner)
        async def call(*args: Any, **kwargs: Any) -> Any:
            if name != "_generated":
                self.watch.mark("other")
            began = time.perf_counter()
            try:
                return await inner(*args, **kwargs)
            finally:
                note(began, kwargs)

        setattr(owner, name, call)

    def _request(self, began: float, _: Mapping[str, Any]) -> None:
        self.watch.requests.append((began, time.perf_counter()))

    def _phase(self, phase: str) -> Callable[[float, Mapping[str, Any]], None]:
        def note(began: float, arguments: Mapping[str, Any]) -> None:
            self.watch.phases[phase].append((began, time.perf_counter()))
            self.watch.mark(phase)
            if phase == "publish":
                self.watch.published[int(arguments["version"])] = time.perf_counter()

        return note


def union(spans: Iterable[Span]) -> list[Span]:
    """The spans without overlap, in order."""
    out: list[Span] = []
    for begin, end in sorted(spans):
        if out and begin <= out[-1][1]:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def share(spans: Iterable[Span], begin: float, end: float) -> float:
    return sum(max(min(b, end) - max(a, begin), 0.0) for a, b in union(spans)) / (end - begin)


def busy_cores(watch: Watch, begin: float, end: float) -> dict[str, float]:
    """Phase -> cores that all processes kept busy in it, between two publications."""
    seconds, used = Counter[str](), Counter[str]()
    for (a, _, before), (b, phase, after) in zip(watch.marks, watch.marks[1:], strict=False):
        if begin <= a and b <= end + 1e-3:
            seconds[phase] += b - a
            used[phase] += sum(after.values()) - sum(before.values())
    return {phase: used[phase] / seconds[phase] for phase in seconds}


def measured_run(watch: Watch, run_dir: Path, k: int, load: float) -> MeasuredRun:
    last = max(watch.published)
    begin, end = watch.published[FIRST], watch.published[last]
    staleness = Counter[int]()
    for step in range(1, last + 1):
        with (run_dir / "rollouts" / f"step_{step}.jsonl").open() as lines:
            for sample in map(json.loads, lines):
                for version, a, b in sample["versions"]:
                    staleness[step - 1 - version] += b - a
    counted = [m for m in watch.marks if begin <= m[0] <= end + 1e-3]
    cpu_s = {role: (counted[-1][2][role] - counted[0][2][role]) / (last - FIRST) for role in counted[0][2]}
    return MeasuredRun(
        max_staleness=k,
        first=FIRST,
        steps=last,
        step_s=(end - begin) / (last - FIRST),
        trainer_idle=1 - share([*watch.phases["train"], *watch.phases["publish"]], begin, end),
        servers_idle=1 - share(watch.requests, begin, end),
        staleness={str(s): n / staleness.total() for s, n in sorted(staleness.items())},
        load=load,
        cpu_s=cpu_s,
    )


def spelt(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


def measure(name: str, home: Path, steps: int, watching: Watching) -> MeasuredSeries:
    """All runs of a series, one after the other."""
    console, config_file = Console(quiet=True), TINY
    settings = spelt(SERIES[name] | {"train.steps": steps})
    more = ["model.make.max_steps=0"]
    if name == "tails":
        config_file, more = home / "tails.toml", []
        config_file.write_text(dump_config(crafted_config(home)))
        settings += ["parallel.dp=2", "parallel.ep=2"]
    runs, calibrating, busy = [], [], dict[str, float]()
    for k in STALENESS:
        config = load_config(config_file, [*settings, *more, f"buffer.max_staleness={k}"])
        run_dir = home / f"{name}-{k}"
        run_dir.mkdir(parents=True)
        root = assemble.staged(config, run_dir, console, None)
        watching.watch, load = Watch(), os.getloadavg()[0]
        train_module.train(model_plan(config, run_dir, root / "hf", root / "megatron"), console, resume=False)
        runs.append(measured_run(watching.watch, run_dir, k, load))
        print(json.dumps({"series": name, **vars_of(runs[-1])}), flush=True)
        if not k:
            calibrating = read_run(run_dir)
            published = watching.watch.published
            busy = busy_cores(watching.watch, published[FIRST], published[max(published)])
            print(json.dumps({"busy": busy}), flush=True)
    return MeasuredSeries(
        name=name,
        settings=settings,
        made=provenance().replace("`", ""),
        cores=float(len(os.sched_getaffinity(0))),
        steps=calibrating,
        busy=busy,
        runs=runs,
    )


def vars_of(run: MeasuredRun) -> dict[str, Any]:
    return {key: getattr(run, key) for key in run.__slots__}


def predicted(series: MeasuredSeries, run: MeasuredRun, seeds: Sequence[int] = range(5)) -> SimulationFigures:
    """The simulation of a run; of several seeds the one with the median step time."""
    config = load_config(TINY, [*series.settings, f"buffer.max_staleness={run.max_staleness}"])
    assumed = read_assumptions(series.assumptions(servers=config.rollout.servers, shards=config.parallel.dp))
    answers = RecordedAnswers(recorded=series.answers, limit=config.rollout.longest_answer)
    found = []
    for seed in seeds:
        settings = loop_settings(config.model_copy(update={"seed": seed}), assumed)
        found.append(figures_of(simulate(settings, assumed, answers), run.first))
    return sorted(found, key=lambda f: f["step_s"]["mean"])[len(found) // 2]


def rows_of(series: MeasuredSeries) -> tuple[list[str], dict[str, float]]:
    """Markdown rows of a series, and its largest errors."""
    rows, worst = [], {"step_error": 0.0, "idle_error": 0.0}
    for run in series.runs:
        figures = predicted(series, run)
        error = errors(run, figures)
        cells = [series.name, str(run.max_staleness), f"{run.step_s:.3f}", f"{figures['step_s']['mean']:.3f}"]
        cells.append(f"{error['step_s']:+.1%}")
        worst["step_error"] = max(worst["step_error"], abs(error["step_s"]))
        for key, seen in (("trainer_idle", run.trainer_idle), ("servers_idle", run.servers_idle)):
            found = seen + error[key]
            cells += [f"{seen:.1%}", f"{found:.1%}"]
            off = 0.0 if abs(error[key]) < POINTS else abs(error[key]) / max(seen, 1e-9)
            worst["idle_error"] = max(worst["idle_error"], off)
        rows.append(f"| {' | '.join(cells)} |")
    return rows, worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--steps", type=int, default=25)
    given = parser.parse_args()
    if given.measure:
        watching = Watching()
        with tempfile.TemporaryDirectory() as home:
            start_ray(None)
            try:
                series = [measure(name, Path(home), given.steps, watching) for name in SERIES]
            finally:
                assemble.shut_down()
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text("[\n" + ",\n".join(json.dumps(s.to_json()) for s in series) + "\n]\n")
    head = ["series", "`max_staleness`", "seconds a step, measured", "simulated", "error"]
    head += ["trainer idle, measured", "simulated", "server idle, measured", "simulated"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    figures: dict[str, float] = {}
    table = Table(*head)
    for one in read_series(RECORD):
        rows, worst = rows_of(one)
        lines += rows
        for row in rows:
            table.add_row(*(cell.strip() for cell in row.strip("|").split("|")))
        figures = {key: max(worst[key], figures.get(key, 0.0)) for key in worst}
    Console().print(table)
    lines += ["", *(f"{s.name}: {s.made}." for s in read_series(RECORD))]
    holds = all(figures[key.removesuffix("_max")] <= goal for key, goal in GOALS.items())
    finish("simulation", figures, GOALS, holds, lines=lines)


if __name__ == "__main__":
    main()
