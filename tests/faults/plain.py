"""A cell of the fault matrix on plain processes (tests/support/local_run.py): the run, the fault, what came of it.

A run has one rank and one server, and what the struck role needs beside them: a second data-parallel rank, a second
server, ranks of a server, a teacher's server that the run starts, a reward service that this module starts again when
it has died or hung. Ray's actors are stand-ins; loop, clients, publisher, checkpoints, engine and Megatron are the
product's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from miles_like.checkpoint.ledger_audit import audit
from tests.faults import effects, points
from tests.faults.cells import Cell, must
from tests.support import kill_points, local_parts, local_run
from tests.support.forked import Forked, answers
from tests.support.local_run import OF_SERVERS, Runs, tensors, untimed
from tests.support.spawn import free_port

STEPS = 3
WHOLE_S, RESUMED_S = 300.0, 300.0  # limits of the struck run and of the resumed one
HANGS_S = 8.0  # after which a driver that hangs is killed from outside
SERVICE_BACK_S = 6.0  # until the reward service is started again
DAMAGED = "run_state.json"
SETTINGS = (
    "train.groups_per_step=2",
    "rollout.max_new_tokens=8",
    "rollout.request_timeout_s=30.0",
    "rollout.restarts=3",
    "mismatch.checksums_every=1",
    "eval.every=0",
)
TURNS = ("cluster.colocate=true",)
SERVICE = ("reward.name=remote", "reward.timeout_s=5", "reward.retries=6", "reward.retry_wait_s=0.5")
TEACHER = ("distillation.mode=added", "distillation.request_timeout_s=30.0")
OF_ROLE: dict[str, tuple[str, ...]] = {  # what a run needs beside one rank and one server
    "rank": ("parallel.dp=2",),
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


# ---- the driver's process


def drive(run_dir: Path, home: Path, settings: Sequence[str], name: str) -> int:
    """name: of the cell; "": nothing strikes."""
    cell = Cell.named(name) if name else None
    kill = points.arm(run_dir, cell)
    if cell is not None:
        effects.plant(cell)
    teacher = []
    if any(word.startswith("distillation.") for word in settings):
        makes = [answers(functools.partial(_teacher, i)) for i in range(4)]
        teacher = [Forked(f"teacher {i}", make, _log(run_dir, i)) for i, make in enumerate(makes)]
        points.also(teacher=teacher[0].pid)
        _serve_teacher(teacher, home)
    _introduce_then(lambda: effects.clock_of("driver"))
    vars(local_parts)["SealingRank"] = _ranks(local_parts.SealingRank)
    servers = 2 if "rollout.servers=2" in settings else 1
    in_server = functools.partial(_in_server, servers)
    try:
        return local_run.drive(run_dir, home, settings, kill, in_server=in_server, spares=3)
    finally:
        for process in teacher:
            process.kill()


def _introduce_then(act: Callable[[], None]) -> None:
    """`act` in the driver once its processes are there."""
    introduce = kill_points.introduce

    def introducing(**pids: int) -> None:
        introduce(**pids)
        act()

    vars(kill_points)["introduce"] = introducing


def _log(run_dir: Path, i: int) -> Path:
    return run_dir / "logs" / f"teacher_{i}.log"


def _in_server(servers: int, number: int) -> None:
    effects.in_server(number == servers - 1)


def _teacher(number: int) -> local_run._Server:
    effects.be("teacher" if number == 0 else "a teacher's replacement")
    return local_run._Server()


def _ranks(rank_class: type) -> type:
    class Seen(points.watched_rank(rank_class)):  # type: ignore[misc]
        def start(self, factory: Any, rank: int, world: int, *rest: Any) -> Any:
            effects.be("rank" if rank == world - 1 else "another rank")
            place = super().start(factory, rank, world, *rest)
            cell = points.cell()
            if cell is not None and (cell.role, cell.kind) == ("rank", "garbage") and rank == world - 1:
                effects.poison(self)
            return place

    return Seen


class _TeacherServers(local_parts.LocalServers):
    """As RayServers of one teacher."""

    def ended(self, url: str) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self._processes[0].pid).status() == psutil.STATUS_ZOMBIE)
        return True


def _serve_teacher(processes: Sequence[Forked], home: Path) -> None:
    """In place of RayServers: the first process, and those that replace it."""
    from miles_like.hf.checkpoint import read_config
    from miles_like.run.setup.teachers import RunTeachers
    from rollout.config import RolloutConfig
    from rollout.sglang.servers import ServerLaunch, embedded_command

    def prepare(self: Any) -> None:
        self._paths["own"] = home / "hf"
        self._vocabularies["own"] = int(read_config(home / "hf")["vocab_size"])

    def launch(self: Any) -> None:
        config = RolloutConfig.model_validate(
            {"embedded": self.config.rollout.embedded.model_copy(update={"tp_size": 1})}
        )
        started = ServerLaunch(model_path=(home / "hf").resolve(), config=config, log_dir=self.run_dir / "logs")
        command = embedded_command(started, port := free_port())
        words = [command[command.index("rollout.embedded.server") + 1 :]]
        self._servers = _TeacherServers(processes[:1], words, [port], processes[1:])
        self._urls = {"own": ""}

    RunTeachers.prepare, RunTeachers.launch = prepare, launch  # type: ignore[method-assign]


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
                self._process.kill()
                self._process.wait()
                self._process = self._start()
                return

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
    if not (run_dir / "done").exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        run_dir.mkdir(parents=True)
        with RewardService(run_dir, "") as reward:
            settings = settings_of(runs.home, reward.port, cell.role, **more)
            code = runs.call(run_dir / "driver.log", drive, run_dir, runs.home, settings, "", timeout_s=WHOLE_S)
        assert code == 0, f"the undisturbed run ended with {code}: {sentence(run_dir / 'driver.log')}"
        (run_dir / "done").touch()
    return run_dir


# ---- a cell


def play(cell: Cell, runs: Runs, where: Path, run_dir: Path) -> dict[str, Any]:
    """What came of a cell. where: of the undisturbed runs. run_dir: of this one, new."""
    whole = undisturbed(runs, where, cell)
    if cell.moment == "resuming":
        shutil.copytree(half(runs, where, cell), run_dir)
        (run_dir / "done").unlink()
    run_dir.mkdir(parents=True, exist_ok=True)
    log = run_dir / "driver.log"
    began = time.monotonic()
    with RewardService(run_dir, cell.name) as reward, Rows(run_dir) as rows:
        settings = settings_of(runs.home, reward.port, cell.role, turns=cell.moment == "asleep")
        if cell.kind == "clock jump":
            settings.append("checkpoint.deadline_s=3600")
        code = struck_run(runs, run_dir, settings, cell)
        did, error = outcome_of(code, run_dir), sentence(log)
        again: int | str = 0
        if did != "goes on":
            if cell.kind == "garbage" and cell.role == "driver":
                error = refused_damage(runs, run_dir, settings)
            again = runs.call(run_dir / "resumed.log", drive, run_dir, runs.home, settings, "", timeout_s=RESUMED_S)
    found = points.witnesses(run_dir)
    report: dict[str, Any] = {
        "did": did if again == 0 else f"{did}; the resumed run ended with {again}: {sentence(run_dir / 'resumed.log')}",
        "sentence": error,
        "witness": {k: v for k, v in found[0].items() if k in ("victims", "seen")} if found else None,
        "seconds": rows.until_next(found[0]["at"]) if found else None,
        "took_s": round(time.monotonic() - began, 1),
    }
    return report | compared(run_dir, whole) | {"struck": bool(found) and points.believed(found[0])}


def struck_run(runs: Runs, run_dir: Path, settings: Sequence[str], cell: Cell) -> int | None:
    """Its exit status; None: it was killed from outside."""
    outside = _Outside(run_dir, cell)
    with outside:
        try:
            code = runs.call(run_dir / "driver.log", drive, run_dir, runs.home, settings, cell.name, timeout_s=WHOLE_S)
        except AssertionError:  # not within the limit: killed there
            return None
    return None if outside.ended else code


class _Outside:
    """What is outside of a run: a scheduler that kills a driver which has hung, and bad luck that damages its files. A
    context manager."""

    def __init__(self, run_dir: Path, cell: Cell) -> None:
        self.run_dir, self.cell, self.ended = run_dir, cell, False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        if self.cell.role != "driver" or must(self.cell).outcome != "is ended":
            return
        while not self._over.wait(0.05):
            if not (self.run_dir / points.STRUCK).exists():
                continue
            if self.cell.kind in ("SIGSTOP", "disk hung"):
                self._over.wait(HANGS_S)
            if self.cell.kind == "garbage":
                self._over.wait(0.5)
                damage(self.run_dir)
            with contextlib.suppress(ProcessLookupError):
                self.ended = True
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


def refused_damage(runs: Runs, run_dir: Path, settings: Sequence[str]) -> str:
    """The sentence with which the damaged checkpoint is refused, after which the one before is the last."""
    damaged = latest(run_dir)
    if damaged is None:
        return "no checkpoint was there yet: nothing could be damaged"
    code = runs.call(run_dir / "refused.log", drive, run_dir, runs.home, settings, "", timeout_s=RESUMED_S)
    refusal = sentence(run_dir / "refused.log")
    assert code == 2 and damaged.name in refusal, (
        f"a damaged checkpoint was not refused with its name: {code}, {refusal}"
    )
    before = [p for p in sorted(damaged.parent.glob("step_*")) if p.name < damaged.name]
    if before:
        (damaged.parent / "latest").write_text(before[-1].name + "\n")
    else:
        (damaged.parent / "latest").unlink()
    shutil.rmtree(damaged)
    return refusal


def outcome_of(code: int | None, run_dir: Path) -> str:
    if code == 0:
        return "goes on"
    if code is None or code == -signal.SIGKILL:
        return "is ended"
    return "ends" if code == 2 else f"ended with status {code}"


def sentence(log: Path) -> str:
    """The error with which a command ended; empty: none."""
    if not log.exists():
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")]
    return lines[-1].removeprefix("error: ")[:600] if lines else ""


def compared(run_dir: Path, whole: Path) -> dict[str, Any]:
    """Ledger, and what of the run differs from the undisturbed one."""
    try:
        found = audit(run_dir / "ledger.jsonl")
        closed = found.wrong or (f"{found.unfinished} unfinished lines" if found.unfinished else "closed")
        if not found.wrong and (not found.steps or found.steps[-1].step != STEPS):
            closed = f"ends at step {found.steps[-1].step if found.steps else 0} of {STEPS}"
    except (OSError, ValueError) as e:
        return {"ledger": str(e), "differs": ["everything"]}
    return {"ledger": closed, "differs": differences(run_dir, whole)}


def differences(run_dir: Path, whole: Path) -> list[str]:
    """Which of samples, ledger, metrics (but of publications) and weights differ; empty: it is bitwise the same."""
    out = []
    with contextlib.suppress(FileNotFoundError):
        for step in range(1, STEPS + 1):
            kept = [(d / "rollouts" / f"step_{step}.jsonl") for d in (run_dir, whole)]
            if kept[0].read_bytes() != kept[1].read_bytes():
                out.append(f"samples of step {step}")
        if (run_dir / "ledger.jsonl").read_bytes() != (whole / "ledger.jsonl").read_bytes():
            out.append("ledger")
        if untimed(run_dir / "metrics.jsonl", *OF_SERVERS) != untimed(whole / "metrics.jsonl", *OF_SERVERS):
            out.append("metrics")
        found, want = (tensors(d / "checkpoints" / f"step_{STEPS}" / "trainer") for d in (run_dir, whole))
        same = found.keys() == want.keys() and all(_equal(x, want[name]) for name, x in found.items())
        return out if same else [*out, "weights"]
    return [*out, "files are missing"]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(a.contiguous().view(torch.uint8).equal(b.contiguous().view(torch.uint8)))


class Rows:
    """When the rows of metrics.jsonl of further steps were there. A context manager."""

    def __init__(self, run_dir: Path, settle: Callable[[], Mapping[int, float]] | None = None) -> None:
        self._file, self._over = run_dir / "metrics.jsonl", threading.Event()
        self.seen: list[tuple[float, int]] = []  # (when, step), also of rows that were taken back
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            self.look()

    def look(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            *_, last = self._file.read_text().splitlines() or [""]
            step = int(json.loads(last)["step"])
            if not self.seen or self.seen[-1][1] != step:
                self.seen.append((time.monotonic(), step))

    def until_next(self, at: float) -> float | None:
        """Seconds from a moment to the end of the step that was under way; None: it did not end."""
        before = max((step for when, step in self.seen if when <= at), default=-1)
        later = [when - at for when, step in self.seen if when > at and step > before]
        return round(later[0], 1) if later else None

    def __enter__(self) -> Rows:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.look()


def each(cells: Sequence[Cell], runs: Runs, where: Path) -> Iterator[dict[str, Any]]:
    """Plays cells one after the other."""
    for i, cell in enumerate(cells):
        run_dir = where / f"cell-{os.getpid()}-{i}"
        yield {"cell": cell.name} | play(cell, runs, where, run_dir)
        shutil.rmtree(run_dir, ignore_errors=True)
