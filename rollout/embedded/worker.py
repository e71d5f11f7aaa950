"""A thread for the engine. Others hand it work and get futures; nothing of the engine is touched from outside."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from rollout.embedded.requests import Completed, PromptSpec
from rollout.embedded.service import Service

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Task:
    run: Callable[[], Any]
    future: Future[Any]
    drain: bool  # only while nothing runs, or generation is paused


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
        """Runs `run` on the engine's thread, between two steps.

        drain: after all running requests have ended (new ones wait meanwhile), unless generation is paused.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._failure is not None or self._stopping:
                future.set_exception(RuntimeError(f"the engine has stopped: {self._failure or 'shut down'}"))
                return future
            self._inbox.append(_Task(run, future, drain))
            self._wake.notify()
        return future

    def generate(self, specs: Sequence[PromptSpec]) -> Future[list[Completed]]:
        """All samples, prompt-major. ValueError when one of the prompts can never run; then none is run."""
        result: Future[list[Completed]] = Future()
        found: dict[int, list[Completed]] = {}

        def deliver(i: int, samples: list[Completed]) -> None:
            found[i] = samples
            if len(found) == len(specs):
                self._pending.discard(result)
                result.set_result([c for j in range(len(specs)) for c in found[j]])

        def submit() -> None:
            engine = self.service.engine
            for spec in specs:
                engine.check(spec)
            self._pending.add(result)
            for i, spec in enumerate(specs):
                engine.submit(spec, partial(deliver, i))

        def refused(task: Future[None]) -> None:
            error = task.exception()
            if error is not None and not result.done():
                result.set_exception(error)

        self.call(submit).add_done_callback(refused)
        return result

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
        engine.hold = bool(later)
        worked = engine.step()
        with self._wake:
            self._inbox.extendleft(reversed(later))
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
                future.set_exception(RuntimeError(f"the engine has stopped: {error or 'shut down'}"))


def _run(task: _Task) -> None:
    try:
        task.future.set_result(task.run())
    except ValueError as e:  # the caller's mistake; anything else is ours and ends the engine
        task.future.set_exception(e)
    except BaseException as e:
        task.future.set_exception(e)
        raise
