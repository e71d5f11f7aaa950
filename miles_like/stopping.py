"""Ends a run before its last step: on SIGTERM or at its deadline the run saves its state and exits.

SIGTERM, as batch systems send it, sets a `StopRequest`, which the loop reads where its state can be saved. If the loop
does not end within `grace_s`, or on a second SIGTERM, it is cancelled: servers are stopped, files closed. As with
Ctrl-C, no exception is raised inside the code that runs at that moment: a user's reward with a bare `except` would
swallow it and training would continue. Only code that blocks the event loop for `PATIENCE_S`, or until a further
SIGTERM, is interrupted. The exit status is 143, saved or not, 75 (EX_TEMPFAIL of sysexits.h) after the deadline, and 3
after an alert that stops the run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, TypeVar

import psutil

from miles_like.variables import command_began as supervisor_began

T = TypeVar("T")
_running: dict[int, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}  # by the thread of `run_to_end`
STATUS = 128 + signal.SIGTERM
TRY_AGAIN = os.EX_TEMPFAIL
BY_ALERT = 3  # an alert has ended the run (docs/alerts.md)
PATIENCE_S = 10.0


class Stopped(Exception):
    """A run ended before its last step on request. The message names the last checkpoint and how to resume."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status  # of the command


class StopRequest:
    """A request to save and end the run. Belongs to one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason = ""  # a sentence, once the stop is requested
        self.status = STATUS

    @property
    def asked(self) -> bool:
        return self._event.is_set()

    def ask(self, reason: str, status: int) -> None:
        """Requests the stop; the first reason stays."""
        if not self.asked:
            self.reason, self.status = reason, status
            self._event.set()

    async def wait(self) -> None:
        """Waits until a stop is requested."""
        await self._event.wait()

    def stopped(self, saved: int | None) -> Stopped:
        """The exception to raise after a stop. saved: step of the last complete checkpoint."""
        how = "nothing is saved yet" if saved is None else f"step {saved} is saved, --resume continues from it"
        return Stopped(f"{self.reason}: {how}", self.status)


class Deadline:
    """Requests a stop when one more step and a save no longer fit into `seconds` after `began`."""

    def __init__(
        self,
        stop: StopRequest,
        seconds: float | None,
        *,
        began: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """began: start of the run by `clock`, in seconds (`run_began`). seconds: checkpoint.deadline_s; None: no stop
        is requested."""
        self._stop, self._seconds, self._clock = stop, seconds, clock
        self._end = 0.0 if seconds is None else began + seconds
        self._step_s = 0.0
        self._save_s: float | None = None
        self._alarm: asyncio.TimerHandle | None = None

    def note(self, step_s: float = 0.0, save_s: float | None = None) -> None:
        """Notes that a step took `step_s`, from boundary to boundary, and a save `save_s`. Call in the event loop.

        A step that takes longer than any before it does not return in time to request the stop: a timer requests it
        while a save still fits, and a loop that waits for samples then saves the boundary before.
        """
        if self._seconds is None:
            return
        self._step_s = max(self._step_s, step_s)
        if save_s is not None:
            self._save_s = max(self._save_s or 0.0, save_s)
        left = self._end - self._clock()
        if left < self._step_s + self._reserve:
            self._ask(left)
        elif self._alarm is None or step_s > 0 or save_s is not None:
            self.close()
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(left - self._reserve, lambda: self._ask(self._end - self._clock()))

    def close(self) -> None:
        """Cancels the timer; the next `note` starts another."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    @property
    def _reserve(self) -> float:
        """Seconds for a save; before the first save, those of a step."""
        return self._step_s if self._save_s is None else self._save_s

    def _ask(self, left: float) -> None:
        save = "a save is assumed to take as long as a step" if self._save_s is None else f"save {self._save_s:.1f} s"
        total = self._step_s + self._reserve
        self._stop.ask(
            f"checkpoint.deadline_s = {self._seconds:g}: {left:.1f} s remain, the longest step took "
            f"{self._step_s:.1f} s, {save}: {total:.1f} s together",
            TRY_AGAIN,
        )


_call_began: float | None = None


def call_begins() -> None:
    """A run begins now, in a process that may be older: a notebook's."""
    global _call_began
    _call_began = time.time()


def command_began() -> float:
    """Start of the run that Python code began last, or else of this process or its supervisor, in seconds as
    `time.time` counts."""
    began = supervisor_began() if _call_began is None else _call_began
    return float(psutil.Process().create_time()) if began is None else began


def run_began() -> float:
    """`command_began`, in seconds as `time.monotonic` counts: a later change of the wall clock does not move it."""
    return time.monotonic() - (time.time() - command_began())


def end_in_order() -> None:
    """Default SIGTERM handler: raises SystemExit in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STATUS))


def run_to_end(main: Coroutine[Any, Any, T], stop: StopRequest | None = None, grace_s: float = 0.0) -> T:
    """`asyncio.run`, in which SIGTERM sets `stop` and cancels `main` once after `grace_s`; without `stop` or `grace_s`
    it cancels at once. The call then ends in SystemExit, whatever the clean-up raises, unless that is `Stopped`."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(_listed(main))
    ending = _Ending(stop, grace_s if stop is not None else 0.0)
    try:
        return asyncio.run(ending.watched(main))
    except Stopped:
        ending.signalled = False  # Stopped has its own exit status
        raise
    finally:
        if ending.signalled:
            raise SystemExit(STATUS)


async def _listed(main: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    _running[threading.get_ident()] = asyncio.get_running_loop(), task
    try:
        return await main
    finally:
        del _running[threading.get_ident()]


def beside_loop(function: Callable[[], T]) -> T:
    """`function()`, which may call `run_to_end`. Where an event loop runs in this thread, as in a notebook, in a
    separate thread, for which this call waits: Ctrl-C then cancels what `run_to_end` runs there, and is raised here
    when that has ended. A second Ctrl-C is raised at once."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return function()
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()  # Thread.join, once interrupted, takes a thread that runs for one that has ended

    def call() -> None:
        try:
            results.append(function())
        except BaseException as e:  # SystemExit too: it would end the thread alone
            errors.append(e)
        finally:
            ended.set()

    thread = threading.Thread(target=call, name="miles_like", daemon=True)
    thread.start()
    try:
        ended.wait()
    except KeyboardInterrupt:
        if (found := _running.get(thread.ident or 0)) is not None:
            loop, task = found
            loop.call_soon_threadsafe(task.cancel)
        ended.wait()
        raise
    if errors:
        raise errors[0]
    return results[0]


class _Ending:
    """Escalates from a stop request to a cancellation to an interrupt: a blocked event loop reacts only to the last."""

    def __init__(self, stop: StopRequest | None, grace_s: float) -> None:
        self._stop, self._grace_s = stop, grace_s
        self.signalled = False  # a SIGTERM has arrived
        self._asked = False  # the stop request has reached the loop
        self._cancelled_at: float | None = None
        self._reached = False  # the cancellation has reached the loop, or the loop has ended

    async def watched(self, main: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._loop = task, asyncio.get_running_loop()
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            return await main
        finally:
            self._reached = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    def _on_signal(self, _signal: int, _frame: FrameType | None) -> None:
        if not self.signalled:
            self.signalled = True
            if self._grace_s > 0:
                self._loop.call_soon_threadsafe(self._ask)
                self._insist_after(self._grace_s + PATIENCE_S)
            else:
                self._order()
        elif self._cancelled_at is None:
            if not self._asked:
                sys.exit(STATUS)
            self._order()
        elif not self._reached or time.monotonic() - self._cancelled_at > PATIENCE_S:
            sys.exit(STATUS)  # earlier it would interrupt the clean-up

    def _ask(self) -> None:
        self._asked = True
        if not self._reached:
            assert self._stop is not None
            self._stop.ask("SIGTERM", STATUS)
            self._loop.call_later(self._grace_s, self._order)

    def _order(self) -> None:
        if self._cancelled_at is None and not self._reached:
            self._cancelled_at = time.monotonic()
            self._loop.call_soon_threadsafe(self._cancel)
            self._insist_after(PATIENCE_S)

    def _cancel(self) -> None:
        if not self._reached:
            self._reached = True
            self._task.cancel()

    def _insist_after(self, seconds: float) -> None:
        def insist() -> None:
            if not self._reached:
                os.kill(os.getpid(), signal.SIGTERM)

        again = threading.Timer(seconds, insist)
        again.daemon = True
        again.start()
