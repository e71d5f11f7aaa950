"""SIGTERM, as batch systems send it, ends a run in order: servers are stopped, files closed, the status is 143.

As with Ctrl-C, nothing is raised inside whatever runs at that moment: a user's reward with a bare `except` would take
it for an answer that it cannot read, and train on. Only what blocks the loop for `PATIENCE_S`, or until somebody sends
a second SIGTERM, is interrupted.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
STATUS = 128 + signal.SIGTERM
PATIENCE_S = 10.0


def end_in_order() -> None:
    """Until something else is said of SIGTERM, it raises SystemExit in the main thread."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(STATUS))


def run_to_end(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, where SIGTERM cancels `main` once and then ends in SystemExit, whatever its cleaning up raises."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(main)
    told_at: float | None = None
    heard = False

    async def watched() -> T:
        nonlocal heard
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel() -> None:
            nonlocal heard
            heard = True
            task.cancel()

        def insist() -> None:
            if not heard:
                os.kill(os.getpid(), signal.SIGTERM)

        def stop(_signal: int, _frame: FrameType | None) -> None:
            nonlocal told_at
            if told_at is None:
                told_at = time.monotonic()
                loop.call_soon_threadsafe(cancel)
                again = threading.Timer(PATIENCE_S, insist)
                again.daemon = True
                again.start()
            elif not heard or time.monotonic() - told_at > PATIENCE_S:  # else it would cut the cleaning up short
                sys.exit(STATUS)

        before = signal.signal(signal.SIGTERM, stop)
        try:
            return await main
        finally:
            heard = True
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    try:
        return asyncio.run(watched())
    finally:
        if told_at is not None:
            raise SystemExit(STATUS)
