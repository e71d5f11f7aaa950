"""Servers and trainer on the same devices: whose turn it is (docs/turns.md, miles_like/turns/order.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from miles_like.simulation.clock.timeline import TrainerTimeline
from miles_like.simulation.inputs.assumptions import TurnAssumptions
from miles_like.simulation.servers.pool import Pool


@dataclass(kw_only=True)
class SimTurns:
    """Begins with the trainer's turn. enabled: False on separate devices, where every method returns at once.

    drain: waits for the samples that a publication waits for, where groups are sampled step by step. publish: sends
    the current weights.
    """

    enabled: bool
    times: TurnAssumptions
    pool: Pool
    timeline: TrainerTimeline
    in_steps: bool
    drain: Callable[[], Awaitable[None]]
    publish: Callable[[], Awaitable[None]]
    _serving: bool = False
    changes: int = 0

    async def begin(self) -> None:
        if self.enabled:
            await self.pool.close()

    async def serving(self) -> None:
        """Give the servers the turn, with a publication if the trainer had it."""
        if self.enabled and not self._serving:
            await self.published()

    async def published(self) -> None:
        """Publish in the trainer's turn; the servers then have the turn."""
        if self.enabled:
            with self.timeline.phase("turn"):
                await asyncio.sleep(self.times.sleep_s + self.times.resume_s)
        await self.publish()
        if self.enabled:
            self._serving, self.changes = True, self.changes + 1
            self.pool.open()

    async def training(self) -> None:
        """Give the trainer the turn: samples in flight end or are aborted first."""
        if not self.enabled or not self._serving:
            return
        with self.timeline.phase("turn"):
            if self.in_steps:
                await self.drain()
            await self.pool.close()
            await asyncio.sleep(self.times.release_s + self.times.wake_s)
        self._serving, self.changes = False, self.changes + 1
