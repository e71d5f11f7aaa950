"""A run that is struck by a random fault every so often, and what that costs: python -m tests.faults.soak --minutes 10

The run is that of plain.py, without an end. Each fault is drawn from `FAULTS` by the seed; every third is followed by
another within its recovery. A driver that has died, or that hangs and is killed, is started again with --resume, as by
--supervise. Lost are the seconds between the ends of two steps beyond those of an undisturbed step, for which the
median stands, so what is trained again is lost too. The result is a line of soaks.jsonl and a table of
docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from miles_like.checkpoint.ledger_audit import audit
from miles_like.report.metrics import TIMINGS
from tests.faults import driver, page, plain, points, record
from tests.faults.compared import Rows, lines_of, sentence
from tests.faults.costs import GOAL, SHARE, STEP_S, Struck, cost, goodput
from tests.support import kill_points, local_parts
from tests.support.local_run import OF_SERVERS, Runs

EVERY_S = 120.0
LARGE = f"goodput of {STEP_S:g} s steps, {SHARE:.0%} of them struck (goal {GOAL:g})"
DIFFERS = "steps that differ from the undisturbed run"
ENDED = "ends of the command, but by a fault or at the end"
MOST_STEPS = 1_000_000
HUNG_S = 15.0  # after which a driver that is stopped is killed
COMPARED = 20  # steps of the undisturbed run, at most
ROLES = ("rank", "server head", "teacher", "reward")  # that a run has beside the driver
KINDS = ("SIGKILL", "SIGSTOP", "slow")
FAULTS = [(role, kind) for role in ("driver", "rank", "server", "teacher", "reward") for kind in KINDS]
STOPPED = 128 + signal.SIGTERM


def drive(run_dir: Path, home: Path, settings: Sequence[str], spares: int) -> int:
    """The driver's process; the present process of each role, and all that are in use, are in pids.json."""
    from miles_like.stopping import Stopped

    of_role: dict[str, list[int]] = {"driver": [os.getpid()]}
    os.environ["TMPDIR"] = tempfile.tempdir = str(run_dir / "tmp")

    def tell() -> None:
        new = run_dir / "pids.new"
        used = [pid for pids in of_role.values() for pid in pids]
        new.write_text(json.dumps({role: pids[-1] for role, pids in of_role.items()} | {"used": used}))
        new.rename(run_dir / points.PIDS)

    def noting(of: type, method: str, role: Any, processes: str) -> None:
        plain_method = getattr(of, method)

        def called(self: Any, *arguments: Any, **more: Any) -> None:
            plain_method(self, *arguments, **more)
            of_role[role(self)] = [process.pid for process in getattr(self, processes)]
            tell()

        setattr(of, method, called)

    def served(servers: Any) -> str:
        return "teacher" if isinstance(servers, driver.TeacherServers) else "server"

    for method in ("__init__", "restart"):
        noting(local_parts.LocalServers, method, served, "_processes")
    noting(local_parts.LocalTrainer, "__init__", lambda trainer: "rank", "_ranks")
    vars(kill_points).update(introduce=lambda **pids: None)
    try:
        return driver.drive(run_dir, home, settings, "", spares)
    except Stopped as e:
        print(e, flush=True)
        return e.status


class Service(plain.RewardService):
    """A reward service that is always started again."""

    def _watch(self) -> None:
        bad_since: float | None = None
        while not self._over.wait(0.5):
            dead = self._process.poll() is not None
            stopped = not dead and psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
            bad_since = (bad_since or time.monotonic()) if dead or stopped else None
            if bad_since is not None and time.monotonic() - bad_since > plain.SERVICE_BACK_S:
                self._process.kill()
                self._process.wait()
                self._process, bad_since = self._start(), None


class Soak:
    """One soak. `run` returns its figures."""

    def __init__(self, runs: Runs, where: Path, minutes: float, every_s: float, seed: int) -> None:
        self.runs, self.run_dir = runs, where / "soak"
        (self.run_dir / "tmp").mkdir(parents=True)
        self.minutes, self.every_s, self.draw = minutes, every_s, random.Random(seed)
        self.seed, self.struck, self.starts, self.ends = seed, list[Struck](), 0, list[str]()
        self.spares = max(6, int(minutes * 60 / every_s))
        self.samples: list[tuple[float, dict[str, float]]] = []
        self._over = threading.Event()

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        with Service(self.run_dir, "") as reward, Rows(self.run_dir) as rows:
            self.rows = rows
            ours = [plain.settings_of(self.runs.home, reward.port, role, steps=MOST_STEPS) for role in ROLES]
            patience = [f"rollout.restarts={self.spares}", f"cluster.rebuilds={self.spares}", "cluster.timeout_s=30"]
            self.settings = [*dict.fromkeys(word for words in ours for word in words), *patience]
            threads = [threading.Thread(target=of, daemon=True) for of in (self._strike_often, self._measure)]
            for thread in threads:
                thread.start()
            self._keep_going(began + 60 * self.minutes)
            self._over.set()
            for thread in threads:
                thread.join()
            steps = rows.seen[-1][1]
            wall = time.monotonic() - began
            differs = self._undisturbed(min(steps, COMPARED))
        return self.figures(steps, wall, differs)

    # ---- what is outside of the run

    def _keep_going(self, until: float) -> None:
        """Starts the command again until the time is over, then ends it with SIGTERM."""
        while time.monotonic() < until:
            self.starts += 1
            (self.run_dir / points.PIDS).unlink(missing_ok=True)
            ended = threading.Event()
            watch = threading.Thread(target=self._end_what_hangs, args=(ended, until), daemon=True)
            watch.start()
            given = (self.run_dir, self.runs.home, self.settings, self.spares)
            limit_s = 60 * self.minutes + 600
            code = self.runs.call(self.run_dir / "driver.log", drive, *given, timeout_s=limit_s)
            if code not in (-signal.SIGKILL, STOPPED):
                self.ends.append(f"status {code}: {sentence(self.run_dir / 'driver.log')}")
            ended.set()
            watch.join()

    def _end_what_hangs(self, ended: threading.Event, until: float) -> None:
        while not ended.wait(0.5):
            now = time.monotonic()
            last = self.rows.seen[-1][0] if self.rows.seen else now
            since = [s.at for s in self.struck if s.at > last]
            stopped = [s.at for s in self.struck if s.at > last and (s.role, s.kind) == ("driver", "SIGSTOP")]
            pid = self._pid("driver")
            if pid is None:
                continue
            if now > until and not since:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                ended.wait(60)
            elif stopped and now - stopped[0] > HUNG_S and _stopped(pid):
                os.kill(pid, signal.SIGKILL)
            if now > until + 90:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _pid(self, role: str) -> int | None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if role == "reward":
                return int((self.run_dir / "reward.pid").read_text())
            return int(json.loads((self.run_dir / points.PIDS).read_text())[role])
        return None

    def _strike_often(self) -> None:
        self._over.wait(self.every_s / 2)
        while not self._over.is_set():
            struck = self._strike(*self.draw.choice(FAULTS))
            if struck and len(self.struck) % 3 == 0:
                self._over.wait(self.draw.uniform(1.0, 3.0))
                self._strike(*self.draw.choice(FAULTS), in_recovery=True)
            self._over.wait(self.every_s if struck else 1.0)

    def _strike(self, role: str, kind: str, *, in_recovery: bool = False) -> bool:
        pid = self._pid(role)
        if pid is None or not psutil.pid_exists(pid) or not self.rows.seen:
            return False
        step = self.rows.seen[-1][1]
        self.struck.append(Struck(role, kind, time.monotonic(), step, in_recovery))
        with contextlib.suppress(ProcessLookupError):
            if kind == "slow":
                program = str(Path(points.__file__).with_name("throttle.py"))
                words = [sys.executable, "-S", "-E", program, kind, f"{points.SLOW_S:g}", str(pid)]
                subprocess.Popen(words, start_new_session=True)
            else:
                os.kill(pid, getattr(signal, kind))
        return True

    def _measure(self) -> None:
        """Of the driver and all that it started, while no fault is being recovered from."""
        while not self._over.wait(2.0):
            last = self.rows.seen[-1][0] if self.rows.seen else 0.0
            if not last or any(s.at > last for s in self.struck):
                continue
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                used = json.loads((self.run_dir / points.PIDS).read_text())["used"]
                family = [psutil.Process(one) for one in used]  # without those that wait to replace others
                family += [child for one in family[1:] for child in one.children(recursive=True)]
                found = {
                    "memory_mib": sum(p.memory_full_info().uss for p in family) / 2**20,
                    "files": float(sum(p.num_fds() for p in family)),
                    "sockets": float(sum(len(p.net_connections()) for p in family)),
                    "processes": float(len(family)),
                }
                self.samples.append((time.monotonic(), found))

    # ---- the figures

    def _undisturbed(self, steps: int) -> list[str]:
        """What differs from the first steps of the undisturbed run."""
        run_dir = self.run_dir.with_name("undisturbed")
        (run_dir / "tmp").mkdir(parents=True)
        with Rows(run_dir) as rows:
            stop = partial(_ended_after, run_dir, steps, rows)
            watch = threading.Thread(target=stop, daemon=True)
            watch.start()
            given = (run_dir, self.runs.home, self.settings, 0)
            self.runs.call(run_dir / "driver.log", drive, *given, timeout_s=1200)
            watch.join()
        mine, theirs = (_rows(d) for d in (self.run_dir, run_dir))
        differs = [f"metrics of step {s}" for s in sorted(theirs.keys() & mine.keys()) if mine[s] != theirs[s]]
        return differs[:3]

    def figures(self, steps: int, wall: float, differs: list[str]) -> dict[str, Any]:
        times = [when for when, step in self.rows.seen if step > 0]
        step_s = statistics.median(b - a for a, b in itertools.pairwise(times))
        first = [s for s in self.struck if not s.in_recovery]
        found = [cost(s, self.struck, self.rows.seen, step_s) for s in first]
        known = [c for c in found if c is not None]
        lost = [c.lost_s for c in known]
        ledger = audit(self.run_dir / "ledger.jsonl")
        large = goodput(known, step_s)
        figures: dict[str, Any] = {
            "minutes": self.minutes,
            "seed": self.seed,
            "faults": len(self.struck),
            "of them within a recovery": sum(s.in_recovery for s in self.struck),
            "starts of the command": self.starts,
            ENDED: "; ".join(self.ends) or "none",
            "replaced within the run": self._replaced(),
            "steps": steps,
            "seconds of a step, median": round(step_s, 2),
            "seconds lost a fault": f"median {statistics.median(lost):.1f}, most {max(lost):.1f}" if lost else "",
            "faults whose recovery was not seen": len(found) - len(known),
            "goodput of this run": round(min(1.0, steps * step_s / wall), 3),
            LARGE: large and round(large, 3),
            DIFFERS: ", ".join(differs) or "none",
            "ledger": ledger.wrong or "closed",
            "trained twice or lost": 0 if ledger.wrong is None else ledger.wrong,
            **self._flat(),
            "left in temporary directories": _left_behind(self.run_dir / "tmp"),
        }
        return figures | {"commit": record.product_commit(), "date": record.today()}

    def _replaced(self) -> str:
        lives = [line["restarted"] for line in lines_of(self.run_dir / driver.CHANGES) if "restarted" in line]
        log = (self.run_dir / "driver.log").read_text(errors="replace")
        counts = Counter(lives) + Counter(ranks=log.count("Trainer ranks were rebuilt"))
        return ", ".join(f"{name}: {n}" for name, n in sorted(counts.items())) or "none"

    def _flat(self) -> dict[str, str]:
        """First and last quarter."""
        if len(self.samples) < 8:
            return {}
        n = len(self.samples) // 4
        out = {}
        for key in self.samples[0][1]:
            first, last = (statistics.median(x[key] for _, x in part) for part in (self.samples[:n], self.samples[-n:]))
            out[f"{key.replace('_', ', ')}: first and last quarter"] = f"{first:.0f}, {last:.0f}"
        return out


def _stopped(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    return False


def _ended_after(run_dir: Path, steps: int, rows: Rows) -> None:
    deadline = time.monotonic() + 1200
    while time.monotonic() < deadline:
        time.sleep(0.2)
        if rows.seen and rows.seen[-1][1] >= steps:
            with contextlib.suppress(OSError, ValueError, KeyError):
                os.kill(json.loads((run_dir / points.PIDS).read_text())["driver"], signal.SIGTERM)
            return


def _rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith((*TIMINGS, *OF_SERVERS))} for row in lines}


def _left_behind(directory: Path) -> str:
    """Names without their random part."""
    names = Counter(p.name[: p.name.find("-") + 1 or 5] for p in directory.iterdir())
    return ", ".join(f"{name}: {n}" for name, n in sorted(names.items())) or "nothing"


def keep(figures: dict[str, Any]) -> None:
    """Replaces the line of this length."""
    lines = {s["minutes"]: s for s in page.soaks()} | {figures["minutes"]: figures}
    text = "".join(json.dumps(lines[m], ensure_ascii=False) + "\n" for m in sorted(lines))
    record.SOAKS.write_text(text, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between two faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry", action="store_true", help="keep no result")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as made:
        where = Path(made)
        (where / "home").mkdir()
        with Runs(where / "home") as runs:
            figures = Soak(runs, where, args.minutes, args.every, args.seed).run()
        if kept := os.environ.get("KEEP_CELLS"):
            shutil.copytree(where / "soak", Path(kept) / "soak", dirs_exist_ok=True)
    if not args.dry:
        keep(figures)
        page.write()
    print(json.dumps(figures, indent=1))
    wrong = figures["ledger"] != "closed" or figures[DIFFERS] != "none" or figures[ENDED] != "none"
    return int(wrong or (figures[LARGE] or 0.0) < GOAL)


if __name__ == "__main__":
    sys.exit(main())
