"""The engine's thread. Other threads submit tasks and get futures; only this thread accesses the engine.

The error of a failed task is raised by its future, and the engine continues. Only an error in a step, which may leave
samples in an inconsistent state, ends the engine; all waiting futures then fail at once.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from miles_like import spans
from rollout.embedded.engine.requests import Completed, Group, PromptSpec
from rollout.embedded.server.service import Service

T = TypeVar("T")


class EngineStopped(RuntimeError):
    """The engine's thread has ended."""


@dataclass(frozen=True, slots=True)
class _Task:
    run: Callable[[], Any]
    future: Future[Any]
    drain: bool  # only while nothing runs, or generation is paused


@dataclass(frozen=True, slots=True)
class Generation:
    """One unfinished request."""

    done: Future[list[Completed]] = field(default_factory=Future)
    groups: list[Group] = field(default_factory=list)  # filled by the engine's thread


class EngineWorker:
    def __init__(self, service: Service, *, threads: int) -> None:
        self.service = service
        self._threads = threads
        self._inbox: deque[_Task] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._pending: set[Future[list[Completed]]] = set()  # unfinished generations
        self._failure: BaseException | None = None
        self._steps = spans.Stretch("engine")
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout=10)

    def end(self, error: Exception) -> None:
        """Ends the engine with an error that comes from elsewhere: all waiting futures fail with it."""
        self._fail(error)
        with self._wake:
            self._wake.notify()

    @property
    def alive(self) -> bool:
        return self._failure is None and self._thread.is_alive()

    def call(self, run: Callable[[], T], *, drain: bool = False) -> Future[T]:
        """Runs `run` on the engine's thread, between two steps. The future raises the exceptions of `run`, or
        EngineStopped.

        drain: run after all running requests have ended (new ones wait meanwhile), unless generation is paused.
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
        """Generates all samples, prompt-major. The future raises ValueError when one of the prompts can never run; then
        none is run."""
        generation = Generation()
        generation.done.set_running_or_notify_cancel()  # so that cancelling a waiter does not make set_result fail
        found: dict[int, list[Completed]] = {}

        def deliver(i: int, samples: list[Completed]) -> None:
            found[i] = samples
            if len(found) == len(specs):
                self._pending.discard(generation.done)
                generation.done.set_result([c for j in range(len(specs)) for c in found[j]])

        def submit() -> None:
            engine = self.service.engine
            entries = [engine.make_entry(spec, partial(deliver, i)) for i, spec in enumerate(specs)]
            generation.groups.extend(e.group for e in entries)
            self._pending.add(generation.done)
            engine.queue(entries)

        def pass_error(task: Future[None]) -> None:
            error = task.exception()
            if error is not None and not generation.done.done():
                generation.done.set_exception(error)

        self.call(submit).add_done_callback(pass_error)
        return generation

    def abort(self, generation: Generation) -> Future[None]:
        """Ends the samples of this request only."""
        return self.call(lambda: self.service.engine.abort_groups(generation.groups))

    def _main(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._turn():
                pass
        except BaseException as e:  # fail all waiting futures before the thread ends
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
            # Only draining tasks wait: an abort or a pause must overtake them.
            if task.drain and not engine.paused and engine.running:
                later.append(task)
            else:
                _run(task)
        with self._wake:  # before the step, so that an error in it fails them
            self._inbox.extendleft(reversed(later))
        engine.hold = bool(later)
        worked = engine.step()
        self._steps.note(worked)
        with self._wake:
            if not worked and not self._stopping and not self._inbox:
                self._wake.wait()
        return True

    def _fail(self, error: BaseException | None) -> None:
        with self._wake:
            self._failure = self._failure or error  # the first is the cause
            self._stopping = True
            waiting: list[Future[Any]] = [*(t.future for t in self._inbox), *self._pending]
            self._inbox.clear()
        for future in waiting:
            with contextlib.suppress(InvalidStateError):  # the engine's thread may finish it at this moment
                future.set_exception(self._stopped())

    def _stopped(self) -> EngineStopped:
        if self._failure is None:
            return EngineStopped("the engine was shut down: start the server again")
        return EngineStopped(
            f"the engine has stopped: {type(self._failure).__name__}: {self._failure}; see the server's log and start "
            "it again"
        )


def _run(task: _Task) -> None:
    if not task.future.set_running_or_notify_cancel():
        return  # the future was cancelled
    try:
        result = task.run()
    except Exception as e:
        task.future.set_exception(e)
    else:
        task.future.set_result(result)
