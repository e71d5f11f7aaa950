"""Where a cell of the fault matrix strikes, and the witness that it was there.

The product has no code for this. `arm` is called in the driver before its processes are forked, or in each process of a
run with Ray through the environment variable of `VARIABLE`; it wraps functions at the moment. The process that comes to
the moment writes what it sees there into a witness file, to disk, and strikes: it sends the victim a signal, or leaves
the file `STRUCK`, at which effects.py in the victim begins. `tests/support/kill_points.py` watches generation, steps,
publications and saves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.faults.cells import SIGNALS, Cell
from tests.support import kill_points
from tests.support.kill_points import Kill

VARIABLE = "FAULT_OF_A_TEST"  # environment variable: JSON of a run directory and a cell's name
STRUCK, WITNESSES, PIDS = "struck", "witnesses.jsonl", "pids.json"
STEP = 1  # of the weights that are served, trained, published or saved
SLOW_S, PARTITION_S = 20.0, 60.0
_WHERE: dict[str, tuple[str, Any]] = {  # of moments that kill_points watches
    "generating": ("generation", 5),
    "mid-step": ("step", "half"),
    "mid-publish": ("publish", 2),
    "mid-save": ("save", "shards"),
}
_cell: Cell | None = None
_run_dir = Path()
_more: dict[str, int] = {}


def arm(run_dir: Path, cell: Cell | None) -> Kill | None:
    """None: nothing strikes. Returns what kill_points has to watch."""
    global _cell, _run_dir
    _cell, _run_dir = cell, run_dir
    if cell is None:
        return None
    vars(kill_points).update(_strike=strike, introduce=introduce)
    _watch_driver(cell.moment)
    if cell.moment not in _WHERE:
        return None
    point, where = _WHERE[cell.moment]
    return Kill(victim=cell.role, point=point, step=STEP, where=where)


def also(**pids: int) -> None:
    """Processes that the driver does not introduce."""
    _more.update(pids)


def introduce(**pids: int) -> None:
    """As that of kill_points."""
    named = {"driver": pids["driver"], "rank": pids["rank"], "server head": pids["server"], **_more}
    new = _run_dir / "pids.new"
    new.write_text(json.dumps(named))
    new.rename(_run_dir / PIDS)
    with (_run_dir / "introduced.jsonl").open("a") as out:
        out.write(json.dumps(pids) + "\n")


def witnesses(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / WITNESSES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def struck() -> bool:
    """Whether the moment has been: for what begins in the victim."""
    return _cell is not None and (_run_dir / STRUCK).exists()


def cell() -> Cell | None:
    return _cell


def run_dir() -> Path:
    return _run_dir


# ---- striking


def strike(**seen: Any) -> None:
    """The witness, then the fault; once in a run directory, whichever process comes first."""
    if _cell is None:
        return
    try:
        os.close(os.open(_run_dir / "first", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    victims = _victims(_cell.role)
    witness = {"cell": _cell.name, "by": os.getpid(), "victims": victims, "at": time.monotonic(), "seen": seen}
    with (_run_dir / WITNESSES).open("a") as out:
        out.write(json.dumps(witness, default=str) + "\n")
        out.flush()
        os.fsync(out.fileno())
    _act(_cell, victims)


def _act(cell: Cell, victims: list[int]) -> None:
    if cell.ground == "spread":
        _until(_run_dir / STRUCK)  # the player strikes: it alone sees the processes of all nodes
        return
    (_run_dir / STRUCK).touch()
    if cell.kind in SIGNALS:
        for pid in victims:
            os.kill(pid, getattr(signal, cell.kind))
    elif cell.kind in ("slow", "partition"):
        seconds = SLOW_S if cell.kind == "slow" else PARTITION_S
        program = Path(__file__).with_name("throttle.py")
        words = [cell.kind, str(seconds), *map(str, victims)]
        subprocess.Popen([sys.executable, "-S", "-E", str(program), *words], start_new_session=True)
    if cell.role == "driver" and cell.kind == "SIGKILL":
        time.sleep(60)  # this process ends with it: what comes after the moment does not happen


def _until(file: Path, seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def _victims(role: str) -> list[int]:
    """Process ids; none where the player strikes."""
    if not (_run_dir / PIDS).exists():
        return []
    pids: Mapping[str, int] = json.loads((_run_dir / PIDS).read_text())
    if role == "server part":
        return [p.pid for p in psutil.Process(pids["server head"]).children()]
    if role == "reward":
        return [int((_run_dir / "reward.pid").read_text())]
    return [pids[role]] if role in pids else []


# ---- moments that kill_points does not watch


def _watch_driver(moment: str) -> None:
    if moment == "idle":
        from miles_like.loop.controller import Controller

        _before(Controller, "run", lambda self, *_, **more: strike(steps=more.get("steps"), first=more.get("first")))


def _before(of: type, name: str, act: Callable[..., None]) -> None:
    plain = getattr(of, name)

    def watched(*arguments: Any, **more: Any) -> Any:
        act(*arguments, **more)
        return plain(*arguments, **more)

    setattr(of, name, watched)


def watched_rank(rank_class: type) -> type:
    """A rank whose first process strikes when it is to wake, and when it is to read a checkpoint."""

    class Watched(rank_class):  # type: ignore[misc]
        def wake(self) -> None:
            done = self.trainer.steps_done
            if _at("asleep") and self.rank == 0 and done == STEP:
                strike(steps_done=done, sleeping=True)
            super().wake()

        def load(self, path: Path) -> None:
            if _at("resuming") and self.rank == 0:
                strike(checkpoint=path.parent.name, files=sorted(p.name for p in path.iterdir())[:4])
            super().load(path)

    return Watched


def _at(moment: str) -> bool:
    return _cell is not None and _cell.moment == moment


def believed(witness: Mapping[str, Any]) -> bool:
    """Whether a witness says that the fault struck at its moment."""
    seen, moment = witness["seen"], Cell.named(witness["cell"]).moment
    match moment:
        case "idle":
            return seen["first"] == 0
        case "generating":
            return bool(seen["running"])
        case "mid-step":
            return bool(seen["masters_moved"]) and not seen["models_moved"]
        case "mid-publish":
            return seen["buckets_sent"] == 2 and not seen["last"]
        case "mid-save":
            return not seen["whole"] and any(".distcp" in name for name in seen["files"])
        case "asleep":
            return bool(seen["sleeping"])
    return str(seen["checkpoint"]).startswith("step_") and bool(seen["files"])
