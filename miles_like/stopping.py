"""SIGTERM, as batch systems send it, ends a run in order: servers are stopped, files closed, the status is 143.

As with Ctrl-C, nothing is raised inside whatever runs at that moment: a user's reward with a bare `except` would take
it for an answer that it cannot read, and train on.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
STATUS = 128 + signal.SIGTERM


def end_in_order() -> None:
    """Until something else is said of SIGTERM, it raises SystemExit in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STATUS))


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, where SIGTERM cancels `main` once and then ends in SystemExit, whatever its cleaning up raises."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(main)
    told = False

    async def watched() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def stop(_signal: int, _frame: FrameType | None) -> None:
            nonlocal told
            if not told:  # a second one would cancel the cleaning up
                told = True
                loop.call_soon_threadsafe(task.cancel)

        before = signal.signal(signal.SIGTERM, stop)
        try:
            return await main
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    try:
        return asyncio.run(watched())
    finally:
        if told:
            raise SystemExit(STATUS)
