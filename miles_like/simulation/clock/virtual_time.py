"""An asyncio event loop in virtual time: its clock jumps to the next timer instead of waiting for it.

Coroutines that only wait for each other and for `asyncio.sleep` run as in real time, with the same order of events, in
the processor time that their own code takes. Two runs of one program have the same events at the same times.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_RESOLUTION_S = 1e-9  # asyncio runs timers that are due within the resolution of the system's clock


class _Jumping(selectors.DefaultSelector):
    """Reports no input or output. Instead of waiting for `timeout` seconds it passes them to `jump`."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("the simulated run waits for an event that never occurs")
        if timeout > 0:
            self._jump(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at time 0. Input and output, signals and threads have no effect in it."""

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__(_Jumping(self._advance))

    def time(self) -> float:
        return self._virtual

    def _advance(self, seconds: float) -> None:
        self._virtual += seconds
        if self._virtual + _RESOLUTION_S == self._virtual:  # asyncio would never reach a timer of exactly this time
            self._virtual = math.nextafter(self._virtual, math.inf)


def run_virtual(body: Coroutine[Any, Any, T]) -> T:
    """The result of `body`, run in virtual time. Raises what it raises, and RuntimeError where every coroutine waits
    for another one."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(body)


def now() -> float:
    """Seconds since the loop began."""
    return asyncio.get_running_loop().time()
