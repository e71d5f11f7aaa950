"""A cell of the fault matrix on plain processes (tests/support/local_run.py): the run, the fault, what came of it.

A run has one rank and one server, and what the struck role needs beside them: a second data-parallel rank, a second
server, ranks of a server, a teacher's server that the run starts, a reward service that this module starts again when
it has died or hung. The driver is under the rules of --supervise. Ray's actors are stand-ins; loop, clients, fleet,
rebuild, supervisor, publisher, checkpoints, engine and Megatron are the product's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from miles_like.launch.supervise import Restarts, Supervisor
from tests.faults import points
from tests.faults.cells import Cell
from tests.faults.compared import Rows, compared, recovery_s, replaced, sentence
from tests.faults.driver import drive
from tests.support.local_run import Runs
from tests.support.spawn import free_port

STEPS = 3
RUN_S = 200.0  # limit of one driver
HANGS_S = 3.0  # after which a driver that hangs is killed from outside
SERVICE_BACK_S = 6.0  # until the reward service is started again
DAMAGED = "run_state.json"
SETTINGS = (
    "train.groups_per_step=2",
    "rollout.max_new_tokens=8",
    "rollout.request_timeout_s=12.0",
    "rollout.restarts=3",
    "rollout.health_every_s=1",
    "rollout.health_timeout_s=6",
    "cluster.rebuilds=3",
    "mismatch.checksums_every=1",
    "eval.every=0",
)
TURNS = ("cluster.colocate=true",)
SERVICE = ("reward.name=remote", "reward.timeout_s=5", "reward.retries=6", "reward.retry_wait_s=0.5")
TEACHER = ("distillation.mode=added", "distillation.request_timeout_s=6.0")
CALL_S = "cluster.timeout_s=12"  # of a rank that does not answer
OF_ROLE: dict[str, tuple[str, ...]] = {  # what a run needs beside one rank and one server
    "rank": ("parallel.dp=2", CALL_S),
    "server head": ("rollout.servers=2",),
    "server part": ("rollout.servers=2", "rollout.embedded.tp_size=2"),
    "teacher": TEACHER,
    "reward": SERVICE,
}


def settings_of(home: Path, port: int, role: str, *, turns: bool = False, steps: int = STEPS) -> list[str]:
    """Of a run with a role, whose reward service is at the port."""
    more = [*OF_ROLE.get(role, ()), *(TURNS if turns else ()), f"train.steps={steps}"]
    if role == "teacher":
        more.append(f"distillation.teachers.own={{kind='server',path='{home / 'hf'}'}}")
    if role == "reward":
        more.append(f"reward.remote.url=http://127.0.0.1:{port}/")
    return [*SETTINGS, *more]


# ---- the reward service


class RewardService:
    """A context manager. What runs it starts it again when it has died, hung or answered only errors for a while."""

    def __init__(self, run_dir: Path, cell: str) -> None:
        self.port, self._run_dir, self._cell = free_port(), run_dir, cell
        self._over = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _start(self) -> subprocess.Popen[bytes]:
        pid = self._run_dir / "reward.pid"
        pid.unlink(missing_ok=True)
        program = Path(__file__).with_name("reward_service.py")
        words = [sys.executable, "-S", "-E", str(program), str(self._run_dir), str(self.port), self._cell]
        process = subprocess.Popen(words)
        deadline = time.monotonic() + 20
        while not pid.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return process

    def _watch(self) -> None:
        """Replaces a service that the cell has struck, where it does not come back by itself."""
        kinds = ("SIGKILL", "SIGSTOP", "out of memory")
        cell = Cell.named(self._cell) if self._cell else None
        if cell is None or cell.role != "reward" or cell.kind not in kinds:
            return
        while not self._over.wait(0.1):
            if (self._run_dir / points.STRUCK).exists():
                self._over.wait(SERVICE_BACK_S)
                self.start_again()
                return

    def start_again(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = self._start()

    def __enter__(self) -> RewardService:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._process.kill()
        self._process.wait()


# ---- the undisturbed run


def undisturbed(runs: Runs, where: Path, cell: Cell) -> Path:
    """The run of a cell's settings in which nothing strikes, made once."""
    turns = cell.moment == "asleep"
    run_dir = where / f"{'turns' if turns else 'whole'}-{_group(cell)}"
    return _made(runs, run_dir, cell, turns=turns)


def half(runs: Runs, where: Path, cell: Cell) -> Path:
    """A run that ended after STEP steps, to be resumed."""
    return _made(runs, where / f"half-{_group(cell)}", cell, steps=points.STEP)


def _group(cell: Cell) -> str:
    return cell.role.replace(" ", "-") if cell.role in OF_ROLE else "plain"


def _made(runs: Runs, run_dir: Path, cell: Cell, **more: Any) -> Path:
    done, given = run_dir / "done", json.dumps(settings_of(Path(), 0, cell.role, **more))
    if not done.exists() or done.read_text() != given:
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        with RewardService(run_dir, "") as reward:
            settings = settings_of(runs.home, reward.port, cell.role, **more)
            code = runs.call(run_dir / "driver.log", drive, run_dir, runs.home, settings, "", timeout_s=RUN_S)
        assert code == 0, f"the undisturbed run ended with {code}: {sentence(run_dir / 'driver.log')}"
        done.write_text(given)
    return run_dir


# ---- a cell


class LocalSupervisor(Supervisor):
    """The rules of --supervise, over drivers that are forked; only the first is struck. starts: of drivers. hung: one
    did not end within RUN_S."""

    def __init__(self, runs: Runs, run_dir: Path, settings: Sequence[str], cell: Cell) -> None:
        limits = Restarts(most=2, window_s=3600.0, wait_s=0.0)
        super().__init__(words=(), run_dir=run_dir, restarts=limits, say=lambda text: None)
        self.starts, self.hung = 0, False
        self._begin: Callable[[str], int] = lambda name: runs.call(
            run_dir / "driver.log", drive, run_dir, runs.home, settings, name, timeout_s=RUN_S
        )
        self._cell = cell

    def _driven(self, words: Sequence[str], began: float) -> int:
        self.starts += 1
        try:
            return self._begin(self._cell.name if self.starts == 1 else "")
        except AssertionError:  # killed at the limit
            self.hung = True
            return 2

    def outcome(self) -> str:
        """Runs drivers to the end."""
        code = self._last_status()
        if self.hung:
            return f"hangs for {RUN_S:g} s"
        if code == 0:
            return "goes on" if self.starts == 1 else "is restarted"
        return "ends" if code == 2 else f"ended with status {code}"


def play(cell: Cell, runs: Runs, where: Path, run_dir: Path) -> dict[str, Any]:
    """What came of a cell. where: of the undisturbed runs. run_dir: of this one, new."""
    whole = undisturbed(runs, where, cell)
    if cell.moment == "resuming":
        shutil.copytree(half(runs, where, cell), run_dir)
        for name in ("done", "introduced.jsonl", "changes.jsonl"):
            (run_dir / name).unlink(missing_ok=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "driver.log"
    began = time.monotonic()
    with RewardService(run_dir, cell.name) as reward, Rows(run_dir) as rows:
        settings = settings_of(runs.home, reward.port, cell.role, turns=cell.moment == "asleep")
        if cell.kind == "clock jump":
            settings.append("checkpoint.deadline_s=3600")
        with _Outside(run_dir, cell):
            did = LocalSupervisor(runs, run_dir, settings, cell).outcome()
        error, others = sentence(log), replaced(run_dir)
        again: int | str = 0
        if did not in ("goes on", "is restarted"):
            if cell.kind == "garbage" and cell.role == "driver":
                put_back(run_dir, error)
            if cell.kind == "garbage" and cell.role == "reward":
                reward.start_again()  # as a person does after the error
            again = runs.call(run_dir / "resumed.log", drive, run_dir, runs.home, settings, "", timeout_s=RUN_S)
    found = points.witnesses(run_dir)
    report: dict[str, Any] = {
        "did": did if again == 0 else f"{did}; the resumed run ended with {again}: {sentence(run_dir / 'resumed.log')}",
        "replaced": others,
        "sentence": error,
        "witness": {k: v for k, v in found[0].items() if k in ("victims", "seen")} if found else None,
        "seconds": rows.until_next(found[0]["at"]) if found else None,
        "recovery_s": recovery_s(run_dir, log, found[0]["at"]) if found else None,
        "took_s": round(time.monotonic() - began, 1),
    }
    return report | compared(run_dir, whole, STEPS) | {"struck": bool(found) and points.believed(found[0])}


class _Outside:
    """What is outside of a run: a scheduler that kills a driver which has hung, and bad luck that damages its files. A
    context manager."""

    def __init__(self, run_dir: Path, cell: Cell) -> None:
        self.run_dir, self.cell = run_dir, cell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        if self.cell.role != "driver" or self.cell.kind not in ("SIGSTOP", "disk hung", "garbage"):
            return
        while not self._over.wait(0.05):
            if not (self.run_dir / points.STRUCK).exists():
                continue
            if self.cell.kind == "garbage":
                self._over.wait(0.5)
                damage(self.run_dir)
            else:
                self._over.wait(HANGS_S)
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads((self.run_dir / points.PIDS).read_text())["driver"], signal.SIGKILL)
            return

    def __enter__(self) -> _Outside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def latest(run_dir: Path) -> Path | None:
    file = run_dir / "checkpoints" / "latest"
    return run_dir / "checkpoints" / file.read_text().strip() if file.exists() else None


def damage(run_dir: Path) -> None:
    """Nonsense in the middle of the driver's file of the last checkpoint."""
    if (folder := latest(run_dir)) is not None:
        with (folder / DAMAGED).open("r+b") as f:
            f.seek(100)
            f.write(b"\x00\xff nonsense")


def put_back(run_dir: Path, refusal: str) -> None:
    """Makes the checkpoint before a damaged one, which the refusal names, the last."""
    damaged = latest(run_dir)
    assert damaged is not None and damaged.name in refusal, f"{damaged} was not refused: {refusal}"
    before = [p for p in sorted(damaged.parent.glob("step_*")) if p.name < damaged.name]
    if before:
        (damaged.parent / "latest").write_text(before[-1].name + "\n")
    else:
        (damaged.parent / "latest").unlink()
    shutil.rmtree(damaged)
