"""`miles-like train --supervise`: a small process that starts the driver of a run and starts it again after its death.

It imports neither torch nor Ray, so that what kills a driver seldom kills it too. The driver is in a separate
process group: the supervisor passes on every SIGTERM, SIGINT and SIGHUP that it gets, once. A driver whose supervisor
ends gets SIGTERM from the kernel, and saves.

A driver is started again where it could not say why it ended: by a signal, or with a status that no command gives. All
statuses that commands give (0, 2, 3, 75, 130, 143) are passed on: 2 would come again, 3 asks for a decision, 75 is the
end of the machine's time, 130 and 143 are orders."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from miles_like.stopping import BY_ALERT
from miles_like.storage.fencing import begun_after, epoch_of
from miles_like.variables import COMMAND_BEGAN, inherited

GIVEN = frozenset({0, 2, BY_ALERT, os.EX_TEMPFAIL, 128 + signal.SIGINT, 128 + signal.SIGTERM})  # statuses of commands
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
LONGEST_WAIT_S = 300.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How often and when a driver is started again: `most` times within any `window_s` seconds, the first time after
    `wait_s`, then after twice as long each time, LONGEST_WAIT_S at most."""

    most: int
    window_s: float
    wait_s: float


def restart_words(words: Sequence[str], *, resume: bool) -> list[str]:
    """The command line of a further start from that of the first, without `--supervise`. resume: the run has begun:
    `--resume` takes the place of `--fresh`, `--from-step` and `--resume`, which it would repeat."""
    kept = [word for word in words if word != "--supervise"]
    if not resume:
        return kept
    out: list[str] = []
    left = iter(kept)
    for word in left:
        if word == "--from-step":
            next(left, None)
        elif word not in ("--fresh", "--no-fresh", "--resume", "--no-resume") and not word.startswith("--from-step="):
            out.append(word)
    return [*out, "--resume"]


def command_line() -> list[str]:
    """The words with which this process was started, from its interpreter on."""
    return [sys.executable, *sys.orig_argv[1:]]


def describe(code: int) -> str:
    """How a process has ended. code: as of Popen.returncode."""
    try:
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    except ValueError:
        return f"was ended by signal {-code}"


@dataclass(kw_only=True)
class Supervisor:
    """Runs a driver to its end. words: its command line with `--supervise`. say: called with each sentence."""

    words: Sequence[str]
    run_dir: Path
    restarts: Restarts
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _signals: deque[int] = field(default_factory=deque, init=False)  # not passed on yet
    _ordered: int | None = field(default=None, init=False)  # the first signal
    _woken: threading.Event = field(default_factory=threading.Event, init=False)
    _times: deque[float] = field(default_factory=deque, init=False)  # of restarts, by `clock`

    def run(self) -> int:
        """The status of the last driver, as a shell gives it. Call it in the main thread. Raises OSError where no
        driver can be started."""
        before = {number: signal.signal(number, self._on_signal) for number in PASSED_ON}
        try:
            return self._last_status()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _last_status(self) -> int:
        since, began, resume = epoch_of(self.run_dir), time.time(), False
        while True:
            code = self._driven(restart_words(self.words, resume=resume), began)
            if code in GIVEN or self._ordered is not None:
                return code if code >= 0 else 128 - code
            resume = resume or begun_after(self.run_dir, since)
            if (wait_s := self._next_wait()) is None:
                limit = f"checkpoint.restarts = {self.restarts.most} within {self.restarts.window_s:g} s"
                self.say(
                    f"the driver {describe(code)} and is not started again ({limit}): see {self.run_dir / 'logs'}, "
                    "then continue with --resume"
                )
                return code if code >= 0 else 128 - code
            how = "with --resume" if resume else "from the beginning, which it had not passed"
            count = f"restart {len(self._times)} of {self.restarts.most} within {self.restarts.window_s:g} s"
            self.say(f"the driver {describe(code)}: {count}, in {wait_s:g} s, {how}")
            if self._woken.wait(wait_s):
                return 128 + (self._ordered or 0)

    def _driven(self, words: Sequence[str], began: float) -> int:
        """One driver, to its end; the status as of Popen.returncode. began: of the first, for checkpoint.deadline_s."""
        self._child = subprocess.Popen(
            words,
            env={**inherited(), COMMAND_BEGAN: repr(began)},
            process_group=0,
            preexec_fn=_stop_with_parent(os.getpid()),
        )
        self._pass_on()
        code = self._child.wait()
        self._child = None
        return code

    def _next_wait(self) -> float | None:
        """Seconds until the next start; None: there is none left."""
        now, limits = self.clock(), self.restarts
        while self._times and now - self._times[0] > limits.window_s:
            self._times.popleft()
        if len(self._times) >= limits.most:
            return None
        wait_s = min(limits.wait_s * 2.0 ** len(self._times), LONGEST_WAIT_S)
        self._times.append(now)
        return wait_s

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._ordered = self._ordered or number
        self._signals.append(number)
        self._woken.set()
        self._pass_on()

    def _pass_on(self) -> None:
        while self._child is not None and self._signals:
            self._child.send_signal(self._signals.popleft())


def _stop_with_parent(parent: int) -> Callable[[], None]:
    """For the driver's process, before its program: the kernel sends it SIGTERM when `parent` ends."""
    library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

    def prepare() -> None:
        if library is not None:
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

    return prepare
