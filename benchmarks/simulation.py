"""Measured runs of the tiny task beside their simulation, which is calibrated on the synchronous run alone.

`--measure` runs configs/tiny.toml with buffer.max_staleness 0, 1, 2 and 4 (the whole loop: two trainer ranks, one
server, the driver and Ray, on this machine's cores) and records them in docs/plan/simulation.json: of the synchronous
run the seconds of each phase, the lengths of its answers and how many cores its processes kept busy in each phase; of
every run the seconds from step to step and the idle shares of trainer and server. Two series: "tiny" as shipped, with
answers of up to 5 tokens, and "tails", a checkpoint crafted so that a few answers are much longer than the others
(long_tail.py). Each run is a separate process and is measured again until other processes kept at most `--most` cores
busy in the meantime (`foreign`). Without `--measure` the recorded runs are compared.

Idle: the trainer, outside of `train` and `publish`; the server, while no request is in flight.

Goals: step time within 15 %, idle shares within 15 % or 0.05.

    python benchmarks/simulation.py [--measure [--home DIR] [--steps 25]] [--write]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from figures import ROOT, add_write, finish, provenance
from long_tail import crafted_config
from rich.console import Console
from rich.table import Table

from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.commands.simulate import loop_settings, read_assumptions
from miles_like.config.load import dump_config, load_config
from miles_like.loop.feed import Feed
from miles_like.nodes.session import start_ray
from miles_like.run import assemble
from miles_like.run import train as train_module
from miles_like.run.model_plan import model_plan
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


class Mark(NamedTuple):
    """The end of a phase. used: processor seconds of the run's processes by role; machine: of all, the host's too."""

    time: float
    phase: str
    used: dict[str, float]
    machine: float


@dataclass
class Watch:
    """What a run did, seen from the driver."""

    requests: list[Span] = field(default_factory=list)
    phases: dict[str, list[Span]] = field(default_factory=lambda: {"samples": [], "train": [], "publish": []})
    published: dict[int, float] = field(default_factory=dict)  # version -> time
    marks: list[Mark] = field(default_factory=list)
    processes: dict[str, list[psutil.Process]] = field(default_factory=dict)

    def mark(self, phase: str) -> None:
        if not self.processes:
            self.processes = by_role()
        used = {role: cpu(of) for role, of in self.processes.items()}
        times = psutil.cpu_times()
        machine = times.user + times.nice + times.system + times.irq + times.softirq + times.steal
        self.marks.append(Mark(time.perf_counter(), phase, used, machine))


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
    """Phase -> cores that all processes of the run kept busy in it, between two publications."""
    seconds, used = defaultdict[str, float](float), defaultdict[str, float](float)
    for before, after in itertools.pairwise(watch.marks):
        if begin <= before.time and after.time <= end + 1e-3:
            seconds[after.phase] += after.time - before.time
            used[after.phase] += sum(after.used.values()) - sum(before.used.values())
    return {phase: used[phase] / seconds[phase] for phase in seconds}


def measured_run(watch: Watch, run_dir: Path, k: int) -> MeasuredRun:
    last = max(watch.published)
    begin, end = watch.published[FIRST], watch.published[last]
    staleness = Counter[int]()
    for step in range(1, last + 1):
        with (run_dir / "rollouts" / f"step_{step}.jsonl").open() as lines:
            for sample in map(json.loads, lines):
                for version, a, b in sample["versions"]:
                    staleness[step - 1 - version] += b - a
    first, *_, final = [m for m in watch.marks if begin <= m.time <= end + 1e-3]
    own = sum(final.used.values()) - sum(first.used.values())
    return MeasuredRun(
        max_staleness=k,
        first=FIRST,
        steps=last,
        step_s=(end - begin) / (last - FIRST),
        trainer_idle=1 - share([*watch.phases["train"], *watch.phases["publish"]], begin, end),
        servers_idle=1 - share(watch.requests, begin, end),
        staleness={str(s): n / staleness.total() for s, n in sorted(staleness.items())},
        cpu_s={role: (final.used[role] - first.used[role]) / (last - FIRST) for role in first.used},
        foreign=(final.machine - first.machine - own) / (final.time - first.time),
    )


def spelt(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]


def measure_one(name: str, k: int, home: Path, steps: int) -> None:
    """One run; its figures replace those of an earlier one with more foreign load in `home`."""
    settings, (config_file, more) = settings_of(name, steps), model_of(name, home)
    config = load_config(config_file, [*settings, *more, f"buffer.max_staleness={k}"])
    with tempfile.TemporaryDirectory(dir=home) as scratch:
        run_dir = Path(scratch) / "run"
        run_dir.mkdir()
        start_ray(None)
        try:
            root = assemble.staged(config, run_dir, Console(quiet=True), None)
            watch = Watching().watch
            plan = model_plan(config, run_dir, root / "hf", root / "megatron")
            train_module.train(plan, Console(quiet=True), resume=False)
        finally:
            assemble.shut_down()
        run = measured_run(watch, run_dir, k)
        steps_ = read_run(run_dir) if not k else []
    busy = busy_cores(watch, watch.published[FIRST], watch.published[max(watch.published)])
    series = MeasuredSeries(
        name=name,
        settings=settings,
        made="",
        cores=float(len(os.sched_getaffinity(0))),
        steps=steps_,
        busy=busy,
        runs=[run],
    )
    print(json.dumps({"series": name, **dataclasses.asdict(run), "busy": busy}), flush=True)
    file = home / f"{name}-{k}.json"
    if not file.exists() or run.foreign < read_series(file)[0].runs[0].foreign:
        file.write_text(json.dumps([series.to_json()]))


def settings_of(name: str, steps: int) -> list[str]:
    """Overrides of configs/tiny.toml."""
    given = SERIES[name] | {"train.steps": steps}
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]


def model_of(name: str, home: Path) -> tuple[Path, list[str]]:
    """The configuration file of the series' model, and its overrides."""
    if name == "tiny":
        return TINY, ["model.make.max_steps=0", f"cache_dir={home / 'cache'}"]
    file = home / "tails.toml"
    if not file.exists():
        file.write_text(dump_config(crafted_config(home)))
    return file, ["parallel.dp=2", "parallel.ep=2", f"cache_dir={home / 'cache'}"]


def measure_all(home: Path, steps: int, most: float, patience_s: float) -> list[MeasuredSeries]:
    """Every run of every series, in separate processes, each again until other load was at most `most` cores or the
    time is over."""
    home.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + patience_s
    while True:
        due = [(name, k) for name in SERIES for k in STALENESS if foreign(home / f"{name}-{k}.json") > most]
        never = [one for one in due if not (home / f"{one[0]}-{one[1]}.json").exists()]
        if not due or (time.monotonic() > until and not never):
            break
        for name, k in never if time.monotonic() > until else due:
            while time.monotonic() < until and (psutil.cpu_percent(10) > 100 * most / (psutil.cpu_count() or 1)):
                pass
            command = [sys.executable, __file__, "--one", name, str(k), "--home", str(home), "--steps", str(steps)]
            subprocess.run(command, check=True)
    return [collected(name, home) for name in SERIES]


def foreign(file: Path) -> float:
    return read_series(file)[0].runs[0].foreign if file.exists() else math.inf


def collected(name: str, home: Path) -> MeasuredSeries:
    parts = [read_series(home / f"{name}-{k}.json")[0] for k in STALENESS]
    runs = [run for part in parts for run in part.runs]
    return dataclasses.replace(parts[0], made=provenance().replace("`", ""), runs=runs)


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
    parser.add_argument("--home", type=Path, help="keeps the measured runs, so that an interrupted --measure continues")
    parser.add_argument("--most", type=float, default=0.1, help="cores that other load may keep busy during a run")
    parser.add_argument("--patience", type=float, default=60.0, help="minutes after which busier runs are accepted")
    parser.add_argument("--one", nargs=2, metavar=("SERIES", "K"), help="measure one run into --home")
    given = parser.parse_args()
    if given.one:
        measure_one(given.one[0], int(given.one[1]), given.home.resolve(), given.steps)
        return
    if given.measure:
        with tempfile.TemporaryDirectory() as scratch:
            home = (given.home or Path(scratch)).resolve()
            series = measure_all(home, given.steps, given.most, 60 * given.patience)
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
