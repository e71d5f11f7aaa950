"""Threads for functions that block: nobody waits for them, neither the loop nor the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

T = TypeVar("T")
Job = Callable[[], None]

LOST_MOST = 256  # calls that were given up and have not returned


class DaemonThreads:
    """As many as there are calls at the same time; each takes the next call when it is done with one.

    The standard library's pool waits for its threads when the process ends; a call that never returns would hang it.
    """

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Job | None]] = []
        self._lost = 0

    async def run(self, call: Callable[[], T]) -> T:
        """`call()`, in a thread. Cancelled, it goes on in its thread and its result is dropped.

        Raises RuntimeError when LOST_MOST such calls have not returned.
        """
        if self._lost >= LOST_MOST:
            raise RuntimeError(f"{self._lost} calls that took too long have still not returned: end them by themselves")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Callable[[], T]] = loop.create_future()
        jobs = self._idle.pop() if self._idle else _start()

        def back(outcome: Callable[[], T]) -> None:
            self._idle.append(jobs)
            if done.cancelled():
                self._lost -= 1
            else:
                done.set_result(outcome)

        def job() -> None:
            outcome: Callable[[], T]
            try:
                outcome = partial(_given, call())
            except BaseException as e:  # a SystemExit would end the thread, and nobody would hear of it
                outcome = partial(_raised, e)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(back, outcome)

        jobs.put(job)
        try:
            outcome = await done
        except asyncio.CancelledError:
            self._lost += done.cancelled()
            raise
        return outcome()

    def close(self) -> None:
        """End those that do nothing."""
        for jobs in self._idle:
            jobs.put(None)
        self._idle.clear()


_KEPT: list[object] = []


def keep_to_the_end(thing: object) -> None:
    """It is not destroyed, not even when the interpreter ends: a coroutine that never ends would not let itself be."""
    if not _KEPT:  # what the frame of such a thread holds is not taken apart
        threading.Thread(target=_hold, args=(_KEPT,), name="kept", daemon=True).start()
    _KEPT.append(thing)


def _hold(things: list[object]) -> None:
    threading.Event().wait()


def _given(value: T) -> T:
    return value


def _raised(error: BaseException) -> NoReturn:
    raise error


def _start() -> queue.SimpleQueue[Job | None]:
    jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
    threading.Thread(target=_work, args=(jobs,), name="reward", daemon=True).start()
    return jobs


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
