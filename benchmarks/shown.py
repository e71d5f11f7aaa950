"""What showing a run costs it: rows with aliases and alerts, trackers, and the page that is served meanwhile.

Runs of configs/tiny.toml take turns, plain and shown. Shown: every alert on with "log", aliases of verl and slime, W&B
and Trackio offline with a table of samples every second step, and `miles-like watch`, which is asked every 2 s as an
open page asks. Plain: none of it. `ratio` is the median over pairs of neighbours of their iterations' medians, shown
over plain; other work on the machine moves it by percents. Beside it, by processor time, on the files of a shown run:

- `row_s`: of the driver for a row, in its loop: aliases, metrics.jsonl, TensorBoard, states of the trackers, alerts.
- `tracker_row_s`: of the trackers' processes for a row and its tables, without their start (`tracker_start_s`).
- `poll_s`: of the page's server for a question that finds a new row.
- `page_s`: by the clock, the page that a run writes at its end.

`row_share`: of the iteration, which waits for it. `beside_share`: of a core, in other processes than the run's.

Goals: row_share <= 1 %, beside_share <= 10 % of a core (an iteration of this model takes seconds, a real one minutes).

    python benchmarks/shown.py [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
from figures import add_write, finish
from iteration import ROOT
from rich.console import Console
from rich.table import Table

from miles_like.alerts.watch import Watch
from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.config.sections.watched.alerts import AlertsConfig
from miles_like.nodes.session import start_ray
from miles_like.page.live_run import LiveRun
from miles_like.page.server import POLL_S
from miles_like.page.write import write_report
from miles_like.protocols import MetricSink
from miles_like.report.aliases import Aliased
from miles_like.report.rows import read_metrics
from miles_like.report.sinks import JsonlSink, MultiSink, TensorboardSink
from miles_like.report.trackers.beside import Trackers
from miles_like.report.trackers.sent import read_sent
from miles_like.run import assemble
from miles_like.run.setup.launcher import freeze_gc
from miles_like.run.setup.model_plan import model_plan
from miles_like.run.train import train

GOALS = {"row_share_max": 0.01, "beside_share_max": 0.10}
WARM = 3
USED = ("wandb", "trackio")
PLAIN = [f"alerts.{name}.action='off'" for name, _ in AlertsConfig().rules()]
SHOWN = [
    "report.aliases=['verl','slime']",
    f"trackers.use={list(USED)}",
    *("trackers.offline=true", "trackers.samples_every=2", "trackers.exit_s=120"),
]


def config_of(steps: int, more: list[str]) -> RunConfig:
    settings = ["model.make.max_steps=0", "eval.every=0", "eval.max_prompts=8", "checkpoint.every=0"]
    return load_config(ROOT / "configs" / "tiny.toml", [*settings, f"train.steps={steps}", *more])


def iteration_s(run_dir: Path, config: RunConfig) -> float:
    """Seconds of an iteration of a run, the median of those after WARM."""
    console = Console(quiet=True)
    run_dir.mkdir()
    start_ray(None)
    root = assemble.staged(config, run_dir, console, None)
    train(model_plan(config, run_dir, root / "hf", root / "megatron"), console, resume=False)
    walls = [row["wall_s"] for row in read_metrics(run_dir / "metrics.jsonl") if "wall_s" in row][WARM:]
    return statistics.median(b - a for a, b in itertools.pairwise(walls))


@contextlib.contextmanager
def open_page(run_dir: Path) -> Iterator[None]:
    """`miles-like watch` in its own process, and an open page of it, from the run's first row on."""
    words = [sys.executable, "-m", "miles_like", "watch", str(run_dir), "--port", "0"]
    over = threading.Event()

    def ask() -> None:
        while not (run_dir / "metrics.jsonl").exists():
            if over.wait(0.1):
                return
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None, "a pipe"
            url = server.stdout.readline().split()[-1]
            step, direct = 0, urllib.request.build_opener(urllib.request.ProxyHandler({}))
            while not over.wait(POLL_S):
                with direct.open(f"{url}rows?after={step}&generation=0") as reply:
                    step = max([step, *(int(row["step"]) for row in json.load(reply)["rows"])])
            server.terminate()

    page = threading.Thread(target=ask)
    page.start()
    try:
        yield
    finally:
        over.set()
        page.join()


class Alive:
    """The process of a tracker that goes on."""

    def poll(self) -> None: ...


def row_s(run_dir: Path, config: RunConfig, home: Path) -> float:
    """Of a row of the run in the driver, as `RunFiles.sink` writes it."""
    trackers = Trackers(config.trackers, run_dir, print)
    trackers._processes = dict.fromkeys(USED, Alive())  # type: ignore[arg-type]
    watch = Watch(config=config.alerts, run="a", say=lambda event: None, ordered=print, lost=print)
    rows = [row for row in read_metrics(run_dir / "metrics.jsonl") if "perf/step_s" in row]
    known = set.intersection(*map(set, rows)) - {"step"}
    sinks: list[MetricSink] = [JsonlSink(home / "again.jsonl"), TensorboardSink(home / "tensorboard"), trackers]
    sink = MultiSink([Aliased(MultiSink(sinks), config.report.aliases), watch])
    began = time.process_time()
    for number, row in enumerate(rows, 1):
        sink.write(number, {key: row[key] for key in known})
    return (time.process_time() - began) / len(rows)


def trackers_s(run_dir: Path, config: RunConfig) -> float:
    """Processor time of the trackers' processes, and of those that they start, which send all rows of a run."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    trackers, spent = Trackers(config.trackers, run_dir, print), dict[int, float]()
    trackers.start()
    own = [psutil.Process(p.pid) for p in trackers._processes.values()]

    def look() -> None:
        for process in own:
            for one in (process, *process.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    spent[one.pid] = times.user + times.system

    while any(read_sent(run_dir, name).step < rows[-1]["step"] for name in USED):
        with contextlib.suppress(psutil.NoSuchProcess):
            look()
        time.sleep(0.05)
    look()
    trackers.end()
    return sum(spent.values())


def copied(run_dir: Path, to: Path, rows: int) -> Path:
    """The run with its first rows, which no tracker has."""
    shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns("trackers", "checkpoints", "tensorboard", "logs"))
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (to / "metrics.jsonl").write_text("".join(lines[:rows]))
    return to


def poll_s(run_dir: Path, home: Path) -> float:
    """Of the page's server for each row that is new, after a first half of them."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    half = len(lines) // 2
    where = copied(run_dir, home / "polled", half)
    run, spent, step = LiveRun(where), 0.0, 0.0
    run.refresh()
    for line in lines[half:]:
        with (where / "metrics.jsonl").open("a") as file:
            file.write(line)
        began = time.process_time()
        found = run.since(step, 0, "")
        json.dumps(found)
        spent += time.process_time() - began
        step = found["rows"][-1]["step"]
    return spent / (len(lines) - half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    steps, order = (12, ("plain", "shown")) if quick else (40, ("plain", "shown", "shown", "plain") * 2)
    configs = {"plain": config_of(steps, PLAIN), "shown": config_of(steps, SHOWN)}
    with tempfile.TemporaryDirectory() as name:
        home, took = Path(name), list[tuple[str, float]]()
        try:
            for number, kind in enumerate(order):
                run_dir = home / f"{kind}_{number}"
                with open_page(run_dir) if kind == "shown" else contextlib.nullcontext():
                    took.append((kind, iteration_s(run_dir, configs[kind])))
        finally:
            assemble.shut_down()
        freeze_gc()  # as a run has done before its first step
        pairs = [dict(took[i : i + 2]) for i in range(0, len(took), 2)]
        last = next(path for path in sorted(home.glob("shown_*"), reverse=True))
        shown = configs["shown"]
        rows = len(read_metrics(last / "metrics.jsonl"))
        start = trackers_s(copied(last, home / "one", 1), shown)
        per_row = max(0.0, trackers_s(copied(last, home / "all", rows), shown) - start) / (rows - 1)
        row, poll = row_s(last, shown, home), poll_s(last, home)
        began = time.perf_counter()
        write_report(last)
        page = time.perf_counter() - began
    iteration = statistics.median(s for kind, s in took if kind == "plain")
    figures = {
        "iteration_s": iteration,
        "ratio": statistics.median(pair["shown"] / pair["plain"] for pair in pairs),
        "row_s": row,
        "tracker_start_s": start,
        "tracker_row_s": per_row,
        "poll_s": poll,
        "page_s": page,
        "row_share": row / iteration,
        "beside_share": (per_row + max(1.0, iteration / POLL_S) * poll) / iteration,
    }
    table = Table("figure", "value", title="a run of configs/tiny.toml that is shown")
    for key, value in figures.items():
        table.add_row(key, f"{value:.3g}")
    Console().print(table)
    holds = all(figures[key.removesuffix("_max")] <= goal for key, goal in GOALS.items())
    finish("shown", figures, GOALS, holds)


if __name__ == "__main__":
    main()
