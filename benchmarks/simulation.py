"""The simulated loop beside measured runs: step time and idle shares with buffer.max_staleness 0, 1, 2 and 4.

The simulation is calibrated on a synchronous run alone (`miles-like simulate --from`). The runs are the whole command,
scripts/run_deepseek.py, on configs/tiny.toml with answers of long-tailed lengths from a checkpoint whose weights are
crafted to have them (long_tail.py): one trainer rank, one server and the driver share the machine's cores. A server is
idle when it has neither a running nor a waiting sample; it is asked ten times a second. Sampling keeps more than the
server's core busy: the cores for it are the processor time of all processes but the rank in the synchronous run, over
the seconds of its rollouts.

Goal: step time within 15 %, idle shares within 15 % or 0.05.

    python benchmarks/simulation.py                    # the recorded runs of docs/plan/simulation.json
    python benchmarks/simulation.py --measure [--steps 24] [--home DIR] [--write]   # runs them here first: 11 minutes

With --write the record and the table in docs/simulation.md are renewed. DIR keeps the runs; one that is whole there is
not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil
from figures import ROOT, add_write, finish, provenance, write_block
from long_tail import SETTINGS, crafted_config
from rich.console import Console
from rich.table import Table

from miles_like.config.load import dump_config, load_config
from miles_like.run.simulation_inputs import assumed_tree, loop_settings, read_assumptions
from miles_like.simulation.calibration import LAST, WARM, read_run
from miles_like.simulation.measured import LoopFigures, Measured, measured_figures, simulated_like
from rollout.server_key import VARIABLE, ServerKey
from rollout.wire.endpoints import SERVER_INFO

RECORD = ROOT / "docs" / "plan" / "simulation.json"
PAGE = ROOT / "docs" / "simulation.md"
CONFIG = "configs/tiny.toml"
STALENESS = (0, 1, 2, 4)
GOALS = {"step_s_off_max": 0.15, "idle_off_max": 1.0}  # idle: as a part of what is allowed
SERVER = "rollout.embedded.server"  # in its command line
POLL_S = 0.1
RANK = "ray::_Rank"  # how Ray names a trainer rank's process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--home", type=Path)
    given = parser.parse_args()
    if given.measure:
        with tempfile.TemporaryDirectory() as scratch:
            record = measured((given.home or Path(scratch)).resolve(), given.steps)
        if given.write:
            RECORD.write_text(json.dumps(record) + "\n", encoding="utf-8")
    else:
        record = json.loads(RECORD.read_text(encoding="utf-8"))
    found = {k: simulated(record, int(k)) for k in record["runs"]}
    show(record, found)
    figures = deviations(record["runs"], found)
    finish("simulation", figures, GOALS, all(figures[goal.removesuffix("_max")] <= GOALS[goal] for goal in GOALS))
    if given.measure and given.write:
        write_block(PAGE, "benchmarks/simulation.py", page_lines(record, found))


def measured(home: Path, steps: int) -> Measured:
    """One run for each staleness; assumptions and answers are of the one that is synchronous."""
    home.mkdir(parents=True, exist_ok=True)
    config = crafted_config(home)
    path = home / "config.toml"
    path.write_text(dump_config(config), encoding="utf-8")
    runs = {str(k): run(path, home / f"k{k}", k, steps) for k in STALENESS}
    busy = json.loads((home / "k0.json").read_text(encoding="utf-8"))["busy"]
    tree, _ = assumed_tree(config, home / "k0", (f"simulation.engine.cores={busy:.3f}",))
    groups = [group for step in read_run(home / "k0") for group in step.groups]
    return Measured(
        machine=provenance(),
        config=CONFIG,
        settings=list(SETTINGS),
        steps=steps,
        assumptions=tree,
        answers=[(group.prompt_tokens, list(group.lengths)) for group in groups],
        runs=runs,
    )


def run(config: Path, run_dir: Path, k: int, steps: int) -> LoopFigures:
    kept = run_dir.with_suffix(".json")
    if kept.exists():
        figures: LoopFigures = json.loads(kept.read_text(encoding="utf-8"))["figures"]
        return figures
    shutil.rmtree(run_dir, ignore_errors=True)  # of a benchmark that was interrupted
    command = [sys.executable, str(ROOT / "scripts" / "run_deepseek.py"), "--config", str(config)]
    command += ["--run-dir", str(run_dir), "--set", f"buffer.max_staleness={k}", "--set", f"train.steps={steps}"]
    log = run_dir.with_suffix(".log")
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        polled = Polled(process, run_dir / "metrics.jsonl")
        polled.until_the_end()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}; {log} ends:\n{log.read_text()[-2000:]}")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    figures = measured_figures(rows, polled.states, max_staleness=k)
    kept.write_text(json.dumps({"figures": figures, "busy": polled.cores_of_rollouts(rows)}), encoding="utf-8")
    print(f"k = {k}: {figures}", flush=True)
    return figures


class Polled:
    """What is seen of a run from outside, ten times a second.

    states: (rows of its metrics, whether the server has no sample). processor: rows -> seconds of processor time that
    all processes but the rank had used when the row was first seen.
    """

    def __init__(self, process: subprocess.Popen[bytes], metrics: Path) -> None:
        self.process, self.metrics = process, metrics
        self.states: list[tuple[int, bool]] = []
        self.processor: dict[int, float] = {}

    def until_the_end(self) -> None:
        asked = None
        while self.process.poll() is None:
            time.sleep(POLL_S)
            if asked is None:
                asked = server_of(self.process)
            elif self.metrics.exists():
                try:
                    with urllib.request.urlopen(asked, timeout=5) as reply:
                        (state,) = json.load(reply)["internal_states"]
                except (OSError, urllib.error.URLError):
                    continue  # it has not started yet, or has ended
                rows = self.metrics.read_bytes().count(b"\n")
                self.states.append((rows, not state["running"] and not state["waiting"]))
                if rows not in self.processor:
                    self.processor[rows] = self._used()

    def _used(self) -> float:
        driver, used = psutil.Process(self.process.pid), 0.0
        for process in (driver, *driver.children(recursive=True)):
            try:
                if not " ".join(process.cmdline()).startswith(RANK):
                    used += sum(process.cpu_times()[:2])
            except psutil.NoSuchProcess:
                continue
        return used

    def cores_of_rollouts(self, rows: list[dict[str, Any]]) -> float:
        """Processor time of the counted steps over the seconds of their rollouts."""
        first, last = WARM + 1, len(rows) - 1 - LAST
        seconds = sum(row["perf/rollout_s"] for row in rows[first:last])
        return float((self.processor[last] - self.processor[first]) / seconds)


def server_of(process: subprocess.Popen[bytes]) -> urllib.request.Request | None:
    """The request for the state of the run's server, once it listens."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
        for child in children:
            if SERVER in " ".join(child.cmdline()):
                ports = [c.laddr.port for c in child.net_connections() if c.status == psutil.CONN_LISTEN]
                key = ServerKey.parse(child.environ()[VARIABLE], "the server's environment")
                if ports:
                    url = f"http://127.0.0.1:{ports[0]}{SERVER_INFO}"
                    return urllib.request.Request(url, headers=key.headers(SERVER_INFO))
    except psutil.NoSuchProcess:
        pass
    return None


def simulated(record: Measured, k: int) -> LoopFigures:
    own = [f"buffer.max_staleness={k}", f"train.steps={record['steps']}"]
    config = load_config(ROOT / record["config"], [*record["settings"], *own])
    return simulated_like(record, loop_settings(config, read_assumptions(record["assumptions"])))


def deviations(runs: dict[str, LoopFigures], found: dict[str, LoopFigures]) -> dict[str, Any]:
    """The largest ones. idle_off: over what is allowed, 15 % of the share or 0.05."""
    pairs = [(runs[k], found[k]) for k in runs]
    idle = [
        abs(s[key] - m[key]) / max(0.15 * m[key], 0.05) for m, s in pairs for key in ("trainer_idle", "servers_idle")
    ]
    return {"step_s_off": max(abs(s["step_s"] / m["step_s"] - 1) for m, s in pairs), "idle_off": max(idle)}


def show(record: Measured, found: dict[str, LoopFigures]) -> None:
    table = Table("max_staleness", "step_s", "trainer idle", "servers idle", title="measured / simulated")
    for k, m in record["runs"].items():
        table.add_row(k, *cells(m, found[k]))
    Console().print(table)


def cells(m: LoopFigures, s: LoopFigures) -> list[str]:
    idle = (f"{m[key]:.1%} / {s[key]:.1%}" for key in ("trainer_idle", "servers_idle"))
    return [f"{m['step_s']:.2f} / {s['step_s']:.2f} ({s['step_s'] / m['step_s'] - 1:+.0%})", *idle]


def page_lines(record: Measured, found: dict[str, LoopFigures]) -> list[str]:
    lines = ["| `buffer.max_staleness` | seconds a step | trainer idle | server idle |", "|---|---|---|---|"]
    return lines + [f"| {k} | {' | '.join(cells(m, found[k]))} |" for k, m in record["runs"].items()]


if __name__ == "__main__":
    main()
