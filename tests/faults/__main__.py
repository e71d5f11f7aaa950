"""Play cells of the fault matrix: python -m tests.faults [--only WORDS ...] [--minutes M] [--again] [--list]

Each result replaces the line of its cell in tests/faults/results.jsonl at once, so that a run may be stopped and begun
again: cells that have a result of the product's present commit are passed over; with --kept DIR the undisturbed runs
stay there for the next time. Two cells are played at a time. The section of docs/reliability.md is written again at the
end. Exit status 1 if a played cell is not as it must be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.faults import page, record
from tests.faults.cells import Cell, cells

SLOTS = 2
_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "COLUMNS": "200"}


def group_of(cell: Cell) -> str:
    """Cells of a group are played by the same processes."""
    return "clock" if cell.kind == "clock jump" else cell.ground


def environment(group: str) -> dict[str, str]:
    """Of a process that plays cells; with another clock for the processes that choose so (effects.be)."""
    out = os.environ | _ENVIRONMENT
    if group == "clock":
        out |= {"FAKETIME": "+0", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "FAKETIME_CACHE_DURATION": "1"}
        out["LD_PRELOAD"] = _FAKETIME
        out["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).with_name("clocked")), str(record.ROOT)])
    return out


def chosen(only: Sequence[str]) -> list[Cell]:
    """Cells whose name has all words of one of the texts, such as "rank SIGKILL", in the order of the texts."""
    found = [cell for text in only or [""] for cell in cells() if all(word in cell.name for word in text.split())]
    return list(dict.fromkeys(found))


def slot(kept: Path | None) -> int:
    """A process that plays: names of cells in, results out, a line each. kept: of undisturbed runs."""
    signal.signal(signal.SIGTERM, _end_with_all)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print is no answer
    with tempfile.TemporaryDirectory(prefix="faults-") as made, contextlib.ExitStack() as stack:
        runs = stack.enter_context(_runs(where := Path(made)))
        if kept is not None:
            kept.mkdir(parents=True, exist_ok=True)
        for i, line in enumerate(sys.stdin):
            cell, run_dir = Cell.named(line.strip()), where / f"cell-{i}"
            result: dict[str, Any] = {"cell": cell.name}
            try:
                result |= _play(cell, runs, kept or where, run_dir)
            except BaseException as e:  # the cell's edge: the others are played
                traceback.print_exc()
                result["broken"] = f"{type(e).__name__}: {e}"[:500]
            print(json.dumps(result), file=answers, flush=True)
            if (there := os.environ.get("KEEP_CELLS")) and run_dir.exists():
                shutil.copytree(
                    run_dir, Path(there) / cell.name.replace(" / ", "-").replace(" ", "_"), dirs_exist_ok=True
                )
            shutil.rmtree(run_dir, ignore_errors=True)
    return 0


def _end_with_all(*_: object) -> None:
    """Also what is stopped, and what a cell leaves behind that was not played to its end."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os._exit(1)


def _runs(where: Path) -> Any:
    from tests.support.local_run import Runs

    (where / "home").mkdir()
    return Runs(where / "home")


def _play(cell: Cell, runs: Any, where: Path, run_dir: Path) -> dict[str, Any]:
    if cell.ground == "plain":
        from tests.faults import plain

        return plain.play(cell, runs, where, run_dir)
    from tests.faults import spread

    return spread.play(cell, runs, where, run_dir)


class Slots:
    """Processes that play the cells of a group, a thread for each. A context manager."""

    def __init__(
        self,
        group: str,
        todo: Iterable[Cell],
        number: int,
        until: float,
        pause: Path | None = None,
        kept: Path | None = None,
    ) -> None:
        """pause: no cell begins while this file exists. kept: of undisturbed runs."""
        self._pause = pause
        self._todo: queue.SimpleQueue[Cell] = queue.SimpleQueue()
        for cell in todo:
            self._todo.put(cell)
        self._until, self.results = until, queue.SimpleQueue[dict[str, Any] | None]()
        command = [sys.executable, "-m", "tests.faults", "--slot"]
        where = [[] if kept is None else ["--kept", str(kept / f"{group}-{i}")] for i in range(number)]
        self._processes = [
            subprocess.Popen(
                [*command, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment(group),
                cwd=record.ROOT,
            )
            for words in where
        ]
        self._threads = [threading.Thread(target=self._feed, args=(p,), daemon=True) for p in self._processes]

    def _feed(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(queue.Empty, OSError):
            while time.monotonic() < self._until:
                while self._pause is not None and self._pause.exists():
                    time.sleep(1)
                cell = self._todo.get_nowait()
                process.stdin.write(f"{cell.name}\n")
                process.stdin.flush()
                line = process.stdout.readline()
                self.results.put(json.loads(line) if line else {"cell": cell.name, "broken": "its process died"})
                if not line:
                    break
        self.results.put(None)

    def __enter__(self) -> Slots:
        for thread in self._threads:
            thread.start()
        return self

    def each(self) -> Iterable[dict[str, Any]]:
        """Results as they come."""
        left = len(self._threads)
        while left:
            if (result := self.results.get()) is None:
                left -= 1
            else:
                yield result

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()


def play_all(
    todo: Sequence[Cell],
    *,
    slots: int,
    until: float,
    commit: str,
    pause: Path | None = None,
    kept: Path | None = None,
) -> int:
    """Plays cells, keeps and prints their results; how many are not as they must be."""
    wrong = done = 0
    for group in ("plain", "clock", "spread"):
        own = [cell for cell in todo if group_of(cell) == group]
        if not own or time.monotonic() >= until:
            continue
        with Slots(group, own, min(slots, len(own)), until, pause, kept) as playing:
            for found in playing.each():
                result = found | {"commit": commit, "date": record.today()}
                record.keep(result)
                faults, done = record.faults_of(result), done + 1
                wrong += bool(faults)
                verdict = "; ".join(faults) or "as it must be"
                seconds = result.get("seconds")
                print(
                    f"{done:>3}/{len(todo)} {result['cell']}: {verdict} ({seconds} s, {result.get('took_s')} s in all)",
                    flush=True,
                )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="cells whose name has all words of one of these texts")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no further cell after so many")
    parser.add_argument("--again", action="store_true", help="also cells with a result of this commit")
    parser.add_argument("--slots", type=int, default=SLOTS, help="cells at a time")
    parser.add_argument("--list", action="store_true", help="print the cells that would be played")
    parser.add_argument("--pause", type=Path, metavar="FILE", help="begin no cell while this file exists")
    parser.add_argument("--kept", type=Path, metavar="DIR", help="keep undisturbed runs there, by the product's commit")
    parser.add_argument("--slot", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.slot:
        return slot(args.kept)
    commit = record.product_commit()
    kept = None if args.kept is None or commit.endswith("+") else args.kept / commit
    todo = chosen(args.only)
    todo = todo if args.again else record.due(todo, commit, record.read())
    if args.list:
        print("\n".join(cell.name for cell in todo))
        return 0
    until = time.monotonic() + 60 * args.minutes
    wrong = play_all(todo, slots=args.slots, until=until, commit=commit, pause=args.pause, kept=kept)
    page.write()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
