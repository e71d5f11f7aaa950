"""Daemon threads for blocking functions: neither the event loop nor the end of the process waits for them."""

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

MOST_LOST = 256  # cancelled calls that have not returned


class DaemonThreads:
    """A pool with one thread for each concurrent call; idle threads are reused.

    The standard library's pool joins its threads when the process ends, so a call that never returns would hang it.
    """

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Job | None]] = []
        self._lost = 0

    async def run(self, call: Callable[[], T]) -> T:
        """The result of `call()`, run in a thread. When cancelled, the call continues in its thread and its result is
        dropped.

        Raises RuntimeError while MOST_LOST cancelled calls have not returned.
        """
        if self._lost >= MOST_LOST:
            raise RuntimeError(
                f"{self._lost} calls exceeded their time limit and have not returned: add a time limit inside "
                "the function"
            )
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
            except BaseException as e:  # a SystemExit would otherwise end the thread silently
                outcome = partial(_raised, e)
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits for the result
                loop.call_soon_threadsafe(back, outcome)

        jobs.put(job)
        try:
            outcome = await done
        except asyncio.CancelledError:
            self._lost += done.cancelled()
            raise
        return outcome()

    def close(self) -> None:
        """End the idle threads."""
        for jobs in self._idle:
            jobs.put(None)
        self._idle.clear()


_KEPT: list[object] = []


def keep_until_exit(thing: object) -> None:
    """Keep `thing` from being destroyed, also at interpreter exit: destroying an endless coroutine would hang."""
    if not _KEPT:  # the interpreter does not clear the frames of daemon threads
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
