"""Cases played in a process that is killed and replaced when it hangs, and their outcomes counted.

The process is forked from one that has imported torch and megatron (tests/support/spawn.py), so its replacement costs
little. A case hangs when it has used `CPU_S` seconds of processor time, or when it is blocked, found so `ASLEEP` times
in a row, after `WALL_S` seconds: a busy machine makes no hang. Its address space is bounded, so a reader of /dev/zero
gets MemoryError instead of the machine's memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.support.spawn import warm_context

CORPUS = Path(__file__).parent / "corpus"
CPU_S, WALL_S, ASLEEP = 20.0, 60.0, 20
ADDRESS_SPACE = 12 << 30  # bytes; torch, Arrow and Megatron map about 5 GiB without using them
GOOD = ("sentence", "accepted")
Case = dict[str, Any]  # JSON


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case.

    kind: "sentence" (refused in words), "accepted" (and an invariant of the target holds), "unsound" (accepted, and it
    does not hold), "fault" (the command calls it a fault of the program), "traceback", "hang" or "crash".
    """

    kind: str
    words: str = ""
    cpu_s: float = 0.0

    @property
    def good(self) -> bool:
        return self.kind in GOOD


class HangError(BaseException):
    """Not an Exception: no handler of the code under test may take it."""


@contextlib.contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Raise HangError in the main thread after `seconds`, in a blocked system call too."""

    def ring(*_: object) -> None:
        raise HangError(f"no answer after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _serve(target: str, line: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)  # a fork has none of the threads that torch had: see tests/support/forked.py
    play = importlib.import_module(f"tests.fuzz.targets.{target}").play
    line.send(None)  # imported
    while (case := line.recv()) is not None:
        started = time.process_time()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            outcome = play(case, Path(folder))
        line.send(Outcome(kind=outcome.kind, words=outcome.words, cpu_s=time.process_time() - started))


class Player:
    """One process that plays cases of a target, replaced after a hang or a crash."""

    def __init__(self, target: str) -> None:
        self.target = target
        self._process: Any = None

    def _start(self) -> None:
        self._line, theirs = Pipe()
        self._process = warm_context().Process(target=_serve, args=(self.target, theirs), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._line.recv()
        except EOFError:
            raise RuntimeError(f"target {self.target} could not be imported") from None

    def play(self, case: Case) -> Outcome:
        if self._process is None:
            self._start()
        self._line.send(case)
        process, started, asleep = psutil.Process(self._process.pid), time.monotonic(), 0
        with contextlib.suppress(psutil.Error):
            used = _cpu(process)
        while not self._line.poll(1.0):
            with contextlib.suppress(psutil.Error):
                waited = time.monotonic() - started
                asleep = asleep + 1 if process.status() == psutil.STATUS_SLEEPING else 0
                if _cpu(process) - used > CPU_S or (asleep > ASLEEP and waited > WALL_S):
                    self.close()
                    return Outcome(kind="hang", cpu_s=CPU_S, words=f"over {CPU_S} s of CPU, or blocked for {WALL_S} s")
        try:
            return self._line.recv()
        except EOFError:
            self._process.join()
            code, self._process = self._process.exitcode, None
            return Outcome(kind="crash", words=f"exit code {code}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def keep(target: str, case: Case) -> Path:
    """Store a case that failed in the corpus."""
    text = json.dumps(case, indent=1, sort_keys=True) + "\n"
    path = CORPUS / target / f"{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def corpus(target: str) -> list[Case]:
    return [json.loads(p.read_text(encoding="utf-8")) for p in sorted((CORPUS / target).glob("*.json"))]


def long_tier(target: str, cases: int, seed: int) -> dict[str, float | int | str]:
    """Play the corpus and `cases` drawn ones; print and keep those that fail."""
    draw = importlib.import_module(f"tests.fuzz.targets.{target}").draw
    player, counts, slowest, failed = Player(target), Counter[str](), 0.0, 0
    kept = corpus(target)
    try:
        for i in range(cases + len(kept)):
            case = kept[i - cases] if i >= cases else json.loads(json.dumps(draw(random.Random(f"{seed}:{i}"))))
            outcome = player.play(case)
            if outcome.kind == "hang":  # on a crowded machine a process may be blocked so long by others: once more
                outcome = player.play(case)
            counts[outcome.kind] += 1
            slowest = max(slowest, outcome.cpu_s)
            if not outcome.good:
                failed += 1
                where = keep(target, case).name if i < cases else "corpus"
                print(f"  case {i} ({where}): {outcome.kind}: {outcome.words[-600:]}", file=sys.stderr, flush=True)
    finally:
        player.close()
    kinds = ("sentence", "accepted", "unsound", "fault", "traceback", "hang", "crash")
    return {
        "cases drawn": cases,
        "cases of the corpus": len(kept),
        **{kind: counts[kind] for kind in kinds},
        "failures": failed,
        "slowest case, s of CPU": round(slowest, 2),
    }
