"""A cell of the fault matrix on two nodes of Linux namespaces with Ray: the product's own command with --supervise, one
rank and one server on each node.

A process at the moment writes the witness and waits there; the player, outside of the nodes, then strikes, for it alone
sees all processes. A run that ended is resumed on two new nodes. The undisturbed run is one on plain processes, to
which a run over nodes is equal bit for bit (tests/cluster/test_spread_run.py).
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from miles_like.cluster import trainer_ranks
from tests.faults import effects, plain, points
from tests.faults.cells import Cell
from tests.faults.compared import Rows, compared, recovery_s, sentence
from tests.support import kill_points
from tests.support.local_run import QUICK, TINY, Runs
from tests.support.namespaces import Cluster, nodes

RUN_S = 300.0  # limit of a run
CALL_S = 45.0  # cluster.timeout_s
SETTINGS = (
    *QUICK,
    "parallel.dp=2",
    "rollout.servers=2",
    "rollout.request_timeout_s=20.0",
    "rollout.restarts=3",
    "rollout.workers=0",
    "train.groups_per_step=2",
    "rollout.max_new_tokens=8",
    "cluster.rebuilds=3",
    "checkpoint.restart_wait_s=0",
    "publish.parts_timeout_s=15",
    "mismatch.checksums_every=1",
    "eval.every=0",
)
_DRIVER, _STRUCK = 0, 1  # nodes


class StruckRank(kill_points.watched_class(points.watched_rank(trainer_ranks._Rank))):  # type: ignore[misc]
    """A trainer rank that strikes at its moments."""

    def __init__(self, log: Path, environment: dict[str, str]) -> None:
        super().__init__(log, environment)
        cell = armed(os.environ)
        if cell is not None:
            effects.plant(cell)

    def start(self, factory: Any, rank: int, world: int, *rest: Any) -> Any:
        effects.be("rank" if rank == world - 1 else "another rank")
        return super().start(factory, rank, world, *rest)

    # Ray copies inherited methods into the class that it pickles, with the local classes of which they are: `super()`
    # there would be of other classes than the actor's

    def publish(self, version: int) -> Any:
        return super().publish(version)

    def save(self, path: Path, asynchronous: bool) -> None:
        super().save(path, asynchronous)

    def load(self, path: Path) -> None:
        super().load(path)

    def wake(self) -> None:
        super().wake()


def armed(environment: Any) -> Cell | None:
    """The cell that the environment names, once this process is armed with it."""
    if not (text := environment.get(points.VARIABLE)):
        return None
    run_dir, name = json.loads(text)
    cell = Cell.named(name)
    kill = points.arm(Path(run_dir), cell)
    kill_points.arm(Path(run_dir), () if kill is None else (kill,))
    return cell


def command() -> None:
    """`miles-like` with the words of the command line after it, with ranks that strike."""
    from miles_like.cli import main
    from miles_like.loop import feed
    from miles_like.report.progress import PhaseBar

    vars(trainer_ranks).update(_Rank=StruckRank)
    cell = armed(os.environ)
    if cell is not None and cell.moment == "generating":
        plain_groups = PhaseBar.groups
        feed.SHOWN_EVERY_S = 0.02  # a rollout of this model is over before it is shown once

        def groups(self: PhaseBar, complete: int, needed: int) -> None:
            plain_groups(self, complete, needed)
            if self._step == points.STEP and complete < needed:
                points.strike(running=needed - complete, version=self._step)

        PhaseBar.groups = groups  # type: ignore[method-assign]
    sys.argv[0] = "miles-like"
    main()


# ---- the player


def play(cell: Cell, runs: Runs, where: Path, run_dir: Path) -> dict[str, Any]:
    """As `plain.play`. where: of what all cells share."""
    began = time.monotonic()
    turns = plain.TURNS if cell.moment == "asleep" else ()
    whole = undisturbed(runs, where / ("spread-turns" if turns else "spread-whole"), turns)
    run_dir.mkdir(parents=True)
    given = settings(runs.home, where, turns)
    with Rows(run_dir / "run") as rows:
        if cell.moment == "resuming":
            with _cluster(run_dir / "whole-nodes") as cluster:
                code = _end(_start(cluster, run_dir, [*given, f"train.steps={points.STEP}"], "first.log"))
            assert code == 0, f"the first half ended with {code}: {sentence(run_dir / 'first.log')}"
        with _cluster(run_dir / "struck-nodes") as cluster:
            resumed = cell.moment == "resuming"
            process = _start(cluster, run_dir, given, "driver.log", cell=cell.name, resume=resumed)
            with _Striker(cluster, run_dir, cell):
                code = _end(process)
        others, again = replaced(run_dir / "driver.log"), 0
        did = outcome_of(code, others)
        if did not in ("goes on", "is restarted"):
            with _cluster(run_dir / "new-nodes") as cluster:
                ended = _end(_start(cluster, run_dir, given, "resumed.log", resume=True))
                again = -1 if ended is None else ended
    found = points.witnesses(run_dir)
    resumed_as = f"{did}; the resumed run ended with {again}: {sentence(run_dir / 'resumed.log')}"
    return {
        "did": did if again == 0 else resumed_as,
        "replaced": others,
        "sentence": sentence(run_dir / "driver.log"),
        "witness": {"seen": found[0]["seen"]} if found else None,
        "seconds": rows.until_next(found[0]["at"]) if found else None,
        "recovery_s": recovery_s(run_dir, run_dir / "driver.log", found[0]["at"]) if found else None,
        "took_s": round(time.monotonic() - began, 1),
        "struck": bool(found) and points.believed(found[0]) and (run_dir / points.STRUCK).exists(),
        **compared(run_dir / "run", whole, plain.STEPS),
    }


def outcome_of(code: int | None, others: Sequence[str]) -> str:
    """code: exit status of the command; None: it was killed at the limit."""
    if code is None:
        return f"hangs for {RUN_S:g} s"
    if code == 0:
        return "is restarted" if "driver" in others else "goes on"
    return "ends" if code == 2 else f"ended with status {code}"


def replaced(log: Path) -> list[str]:
    """Parts that are other processes than at the start, by the output of the command."""
    text = " ".join(log.read_text(errors="replace").split())
    reported = {"driver": "supervise: the driver", "ranks": "Trainer ranks were rebuilt", "server": ") is restarting"}
    return [part for part, words in reported.items() if words in text]


def settings(home: Path, where: Path, turns: Sequence[str]) -> list[str]:
    """Of a run over two nodes, on the shared disk."""
    if not (model := (where / "hf").resolve()).exists():  # where it stays, and is converted once
        shutil.copytree((home / "hf").resolve(), model)
    return [
        *SETTINGS,
        *turns,
        f"train.steps={plain.STEPS}",
        "cluster.nodes=2",
        f"cluster.timeout_s={CALL_S:g}",
        f"model.path={model}",
        "model.make=false",
        f"cache_dir={where / 'cache'}",
    ]


def undisturbed(runs: Runs, run_dir: Path, turns: Sequence[str]) -> Path:
    if not (run_dir / "done").exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        code = runs.run(run_dir, [*SETTINGS, *turns, f"train.steps={plain.STEPS}"])
        assert code == 0, f"the undisturbed run ended with {code}: {run_dir}/driver.log"
        (run_dir / "done").touch()
    return run_dir


@contextlib.contextmanager
def _cluster(work: Path) -> Iterator[Cluster]:
    work.mkdir(parents=True)
    with nodes(2, work=work, disk_mib=64) as cluster:
        cluster.start_ray(cpus=4)
        yield cluster


def _start(
    cluster: Cluster, run_dir: Path, given: Sequence[str], log: str, *, cell: str = "", resume: bool = False
) -> subprocess.Popen[bytes]:
    """The command on the first node. The run is in `run_dir`/run."""
    fault = {points.VARIABLE: json.dumps([str(run_dir), cell])} if cell else {}
    spec = ",".join(f"{name}='{value}'" for name, value in fault.items())
    words = [w for s in (*given, *([f"cluster.env={{{spec}}}"] if fault else [])) for w in ("--set", s)]
    train = ["train", str(TINY), "--run-dir", str(run_dir / "run"), "--ray-address", cluster.ray_address, *words]
    train += ["--supervise"]
    with (run_dir / log).open("ab") as out:
        program = [sys.executable, "-c", "from tests.faults.spread import command; command()"]
        process: subprocess.Popen[bytes] = cluster[_DRIVER].popen(
            [*program, *train, *(["--resume"] if resume else [])],
            stdout=out,
            stderr=out,
            env={"COLUMNS": "200", **fault},
        )
    return process


def _end(process: subprocess.Popen[bytes]) -> int | None:
    """Its exit status; None: it did not end by itself."""
    try:
        return process.wait(RUN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


class _Striker:
    """Strikes when the witness is there. A context manager."""

    def __init__(self, cluster: Cluster, run_dir: Path, cell: Cell) -> None:
        self._cluster, self._run_dir, self._cell = cluster, run_dir, cell
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._over.wait(0.02):
            if points.witnesses(self._run_dir):
                self._strike()
                return

    def _strike(self) -> None:
        kind, node = self._cell.kind, self._cluster[_STRUCK]
        victims = self._victims()
        if self._cell.role == "node" and kind == "partition":
            node.unplug()
            (self._run_dir / points.STRUCK).touch()
            self._over.wait(points.PARTITION_S)
            node.plug_in()
            return
        if kind in ("SIGKILL", "SIGSTOP"):
            for victim in victims:
                with contextlib.suppress(psutil.NoSuchProcess):
                    victim.send_signal(getattr(signal, kind))
        (self._run_dir / points.STRUCK).touch()
        if kind in ("slow", "partition"):
            seconds = points.SLOW_S if kind == "slow" else points.PARTITION_S
            program = Path(points.__file__).with_name("throttle.py")
            words = [kind, f"{seconds:g}", *(str(v.pid) for v in victims)]
            subprocess.Popen([sys.executable, "-S", "-E", str(program), *words], start_new_session=True)

    def _victims(self) -> list[psutil.Process]:
        """As this machine counts them. A node that is killed is its first process, with which all others end."""
        head = self._cell.role == "Ray head"
        first = psutil.Process(self._cluster[_DRIVER if head else _STRUCK]._init.pid)
        family = first.children(recursive=True)
        # what is started on a node from outside is in its namespace, but not below its first process
        inside = os.readlink(f"/proc/{first.pid}/ns/pid")
        family += [p for p in psutil.process_iter() if p not in family and _namespace(p) == inside]
        if self._cell.role == "node":
            return [first] if self._cell.kind == "SIGKILL" else [p for p in family if p != first]
        name = "gcs_server" if head else "ray::_Rank"  # as the class that Ray names it by ends
        found = [p for p in family if _is(p, name, head)]
        assert found, f"no process of {self._cell.role} was found"
        return found

    def __enter__(self) -> _Striker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _namespace(process: psutil.Process) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/ns/pid")
    return ""


def _is(process: psutil.Process, name: str, head: bool) -> bool:
    with contextlib.suppress(psutil.Error):
        line = " ".join(process.cmdline())
        return name in line if head else "ray::" in line and "Rank" in line
    return False
