"""The driver's process of a run on plain processes (tests/support/local_run.py), with parts that strike and are struck,
and what it writes of processes that take the place of others."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults import effects, points
from tests.faults.cells import Cell
from tests.support import kill_points, local_parts, local_run
from tests.support.forked import Forked, answers
from tests.support.spawn import free_port

SPARES = 3  # servers that are there to replace others; half as many teachers
CHANGES = "changes.jsonl"  # in the run directory: restarted servers, and states of rollout servers


def drive(run_dir: Path, home: Path, settings: Sequence[str], name: str, spares: int = SPARES) -> int:
    """name: of the cell; "": nothing strikes. Ranks are there for as many losses as there are spare servers."""
    cell = Cell.named(name) if name else None
    kill = points.arm(run_dir, cell)
    if cell is not None:
        effects.plant(cell)
    teachers = []
    if any(word.startswith("distillation.") for word in settings):
        makes = [answers(functools.partial(_teacher, i)) for i in range(1 + spares)]
        teachers = [Forked(f"teacher {i}", make, _log(run_dir, i)) for i, make in enumerate(makes)]
        points.also(teacher=teachers[0].pid)
        serve_teacher(teachers, home)
    _introduce_then(lambda: effects.clock_of("driver"))
    note_changes(run_dir)
    vars(local_parts)["SealingRank"] = _ranks(local_parts.SealingRank)
    in_server = functools.partial(_in_server, 2 if "rollout.servers=2" in settings else 1)
    try:
        return local_run.drive(
            run_dir, home, settings, kill, in_server=in_server, spares=spares, spare_ranks=spares // 2
        )
    finally:
        for process in teachers:
            process.kill()


def _introduce_then(act: Callable[[], None]) -> None:
    """`act` in the driver once its processes are there."""
    introduce = kill_points.introduce

    def introducing(**pids: int) -> None:
        introduce(**pids)
        act()

    vars(kill_points)["introduce"] = introducing


def note_changes(run_dir: Path) -> None:
    """Writes down which server is restarted, and when the state of a rollout server changes."""
    from miles_like.fleet.roster import Roster

    restart, move = local_parts.LocalServers.restart, Roster.move

    def note(**what: Any) -> None:
        with (run_dir / CHANGES).open("a") as out:
            out.write(json.dumps({"at": time.monotonic(), **what}) + "\n")

    def restarting(self: Any, number: int) -> None:
        note(restarted="teacher" if isinstance(self, TeacherServers) else "server", number=number)
        restart(self, number)

    def moving(self: Any, server: Any, event: Any, *rest: Any) -> None:
        before = server.state
        move(self, server, event, *rest)
        if server.state is not before:
            note(server=server.number, state=server.state.value)

    local_parts.LocalServers.restart = restarting  # type: ignore[method-assign]
    Roster.move = moving  # type: ignore[method-assign]


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


class TeacherServers(local_parts.LocalServers):
    """As RayServers of one teacher."""


def serve_teacher(processes: Sequence[Forked], home: Path) -> None:
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
        self._servers = TeacherServers(processes[:1], words, [port], processes[1:])
        self._urls = {"own": ""}

    RunTeachers.prepare, RunTeachers.launch = prepare, launch  # type: ignore[method-assign]
