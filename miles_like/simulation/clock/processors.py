"""Work that shares processors.

On CPU the trainer's ranks, the engine and the driver compete for the same cores whenever they overlap. Each piece of
work has a length in seconds at full speed and the number of cores that it keeps busy meanwhile. While the work that is
running needs more cores than there are, all of it advances at the same reduced rate, cores / needed: the fair share
that a scheduler gives to threads of equal priority. No processor time is lost or gained by sharing.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from miles_like.simulation.clock.virtual_time import now

_DONE_S = 1e-9  # seconds of work below which it counts as finished: rounding of times


@dataclass(slots=True, eq=False)
class Work:
    """Work that is running. cores: kept busy at full speed."""

    seconds: float  # at full speed
    cores: float
    left: float  # at full speed, at the last change of the processors
    done: asyncio.Future[None]


@dataclass(kw_only=True)
class Processors:
    """cores: shared by all work; infinity: separate devices, no work delays another."""

    cores: float = math.inf
    used: float = 0.0  # core seconds
    _running: dict[Work, None] = field(default_factory=dict)
    _since: float = 0.0  # of the last change
    _rate: float = 1.0  # since then
    _timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float, cores: float) -> Work:
        """Work whose `done` is set when it ends."""
        self._advance()
        work = Work(seconds, cores, seconds, asyncio.get_running_loop().create_future())
        self._running[work] = None
        self._plan()
        return work

    def stop(self, work: Work) -> float:
        """Ends `work` early, if it is running; returns the seconds at full speed that are done."""
        self._advance()
        self._running.pop(work, None)
        self._plan()
        return work.seconds - max(work.left, 0.0)

    async def run(self, seconds: float, cores: float) -> None:
        if seconds <= 0:
            return
        work = self.begin(seconds, cores)
        try:
            await work.done
        finally:
            if not work.done.done() or work.done.cancelled():
                self.stop(work)

    def _advance(self) -> None:
        elapsed = (now() - self._since) * self._rate
        self._since = now()
        for work in self._running:
            work.left -= elapsed
            self.used += elapsed * work.cores

    def _plan(self) -> None:
        """Sets the rate and the timer of the work that ends first."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running:
            needed = sum(work.cores for work in self._running)
            self._rate = min(1.0, self.cores / needed) if needed > 0 else 1.0
            soonest = max(min(work.left for work in self._running), 0.0)
            self._timer = asyncio.get_running_loop().call_later(soonest / self._rate, self._end)

    def _end(self) -> None:
        self._timer = None
        self._advance()
        soonest = min(work.left for work in self._running)
        for work in [w for w in self._running if w.left <= max(soonest, _DONE_S)]:
            del self._running[work]
            if not work.done.done():
                work.done.set_result(None)
        self._plan()
