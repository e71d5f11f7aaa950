"""A thread for the engine. Others hand it work and get futures; nothing of the engine is touched from outside.

A task that fails fails alone: it raises in the caller's future, and the engine goes on. Only an error in a step, which
may have left samples half-way, ends the engine; everything that waits for it is then answered at once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from rollout.embedded.requests import Completed, Group, PromptSpec
from rollout.embedded.service import Service

T = TypeVar("T")


class EngineStopped(RuntimeError):
    """The engine's thread has ended and answers nothing any more."""


@dataclass(frozen=True, slots=True)
class _Task:
    run: Callable[[], Any]
    future: Future[Any]
    drain: bool  # only while nothing runs, or generation is paused


@dataclass(frozen=True, slots=True)
class Generation:
    """One request under way."""

    done: Future[list[Completed]] = field(default_factory=Future)
    groups: list[Group] = field(default_factory=list)  # filled by the engine's thread


class EngineWorker:
    def __init__(self, service: Service, *, threads: int) -> None:
        self.service = service
        self._threads = threads
        self._inbox: deque[_Task] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._pending: set[Future[Any]] = set()  # generations under way
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    @property
    def alive(self) -> bool:
        return self._failure is None and self._thread.is_alive()

    def call(self, run: Callable[[], T], *, drain: bool = False) -> Future[T]:
        """Runs `run` on the engine's thread, between two steps. The future raises whatever `run` raises, or
        EngineStopped.

        drain: after all running requests have ended (new ones wait meanwhile), unless generation is paused.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._failure is not None or self._stopping:
                future.set_exception(self._stopped())
                return future
            self._inbox.append(_Task(run, future, drain))
            self._wake.notify()
        return future

    def generate(self, specs: Sequence[PromptSpec]) -> Generation:
        """All samples, prompt-major. ValueError when one of the prompts can never run; then none is run."""
        asked = Generation()
        asked.done.set_running_or_notify_cancel()  # who waits may give up; the result is then dropped, not refused
        found: dict[int, list[Completed]] = {}

        def deliver(i: int, samples: list[Completed]) -> None:
            found[i] = samples
            if len(found) == len(specs):
                self._pending.discard(asked.done)
                asked.done.set_result([c for j in range(len(specs)) for c in found[j]])

        def submit() -> None:
            engine = self.service.engine
            entries = [engine.made(spec, partial(deliver, i)) for i, spec in enumerate(specs)]
            asked.groups.extend(e.group for e in entries)
            self._pending.add(asked.done)
            engine.queue(entries)

        def refused(task: Future[None]) -> None:
            error = task.exception()
            if error is not None and not asked.done.done():
                asked.done.set_exception(error)

        self.call(submit).add_done_callback(refused)
        return asked

    def abort(self, asked: Generation) -> Future[None]:
        """Ends the samples of this request and of no other."""
        return self.call(lambda: self.service.engine.abort_groups(asked.groups))

    def _main(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._turn():
                pass
        except BaseException as e:  # the process edge of this thread: whoever waits must hear of it
            self._fail(e)
            raise
        self._fail(None)

    def _turn(self) -> bool:
        engine = self.service.engine
        with self._wake:
            if self._stopping:
                return False
            tasks = list(self._inbox)
            self._inbox.clear()
        later = []
        for task in tasks:
            # Those behind a draining one keep their place only if they drain too: an abort or a pause must pass it.
            if task.drain and not engine.paused and engine.running:
                later.append(task)
            else:
                _run(task)
        with self._wake:  # before the step: an error in it must find them
            self._inbox.extendleft(reversed(later))
        engine.hold = bool(later)
        worked = engine.step()
        with self._wake:
            if not worked and not self._stopping and not self._inbox:
                self._wake.wait()
        return True

    def _fail(self, error: BaseException | None) -> None:
        with self._wake:
            self._failure = error
            self._stopping = True
            waiting = [t.future for t in self._inbox] + list(self._pending)
            self._inbox.clear()
        for future in waiting:
            if not future.done():
                future.set_exception(self._stopped())

    def _stopped(self) -> EngineStopped:
        if self._failure is None:
            return EngineStopped("the engine has stopped: shut down")
        return EngineStopped(
            f"the engine has stopped: {type(self._failure).__name__}: {self._failure}; see the server's log and start "
            "it again"
        )


def _run(task: _Task) -> None:
    if not task.future.set_running_or_notify_cancel():
        return  # nobody waits for it any more
    try:
        result = task.run()
    except Exception as e:
        task.future.set_exception(e)
    else:
        task.future.set_result(result)
