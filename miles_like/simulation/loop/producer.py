"""The admission of prompts, with the rules of miles_like/loop/producer.py: in steps, in lockstep, or freely.

tests/miles_like/simulation/test_rules.py runs both on the same events.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miles_like.simulation.clock.virtual_time import now
from miles_like.simulation.loop.buffer import SimBuffer
from miles_like.simulation.servers.samples import SimGroup

OVERSAMPLED = "more than the step needs"
FILTERED = "by the filter"


class GroupsSampler(Protocol):
    def groups(self, groups: Sequence[SimGroup]) -> AsyncGenerator[int, None]:
        """Yields the place of each group when it is scored."""

    async def abort(self) -> None:
        """Ends all requests that are in flight on the servers."""


@dataclass(kw_only=True)
class ProducerState:
    """The content of a producer in a checkpoint. rounds: ids of groups not yet accepted or discarded, by the number of
    their round."""

    step: int = 0  # that is being filled
    kept: int = 0
    tried: int = 0
    number: int = 0
    rounds: dict[int, list[int]] = field(default_factory=dict)


@dataclass(kw_only=True)
class SimProducer:
    """Fields as of Producer. make: group id -> its group, not yet sampled."""

    groups: int
    buffer: SimBuffer
    sampler: GroupsSampler
    make: Callable[[int], SimGroup]
    lockstep: bool = False
    over_sampling: float | None = None
    steps: int
    max_rounds: int = 1
    version: int = 0
    state: ProducerState = field(default_factory=ProducerState)
    _decided: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def in_steps(self) -> bool:
        return self.lockstep or self.buffer.slack == 0

    @property
    def early_abort(self) -> bool:
        return bool(self.over_sampling) and self.in_steps and not self.lockstep

    @property
    def room(self) -> int:
        share = self.buffer.max_staleness if self.over_sampling is None else self.over_sampling
        return math.ceil(self.groups * (1 + share))

    @property
    def drained(self) -> bool:
        return not self.state.rounds and not self._may_admit()

    async def run(self) -> None:
        """Raises RuntimeError where max_rounds * groups sampled prompts do not fill a step. Does not end."""
        running: set[asyncio.Task[None]] = set()
        rounds = list(self.state.rounds)
        try:
            while True:
                self.buffer.wake.clear()
                for task in [t for t in running if t.done()]:
                    running.remove(task)
                    task.result()
                for number in rounds or self._admitted():
                    running.add(task := asyncio.create_task(self._sampled(number)))
                    task.add_done_callback(lambda _: self.buffer.wake.set())
                rounds = []
                await self.buffer.wake.wait()
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def published(self, version: int) -> None:
        self.buffer.trained()
        self.version = version
        self.buffer.wake.set()

    async def drain(self) -> None:
        while not self.drained:
            self._decided.clear()
            await self._decided.wait()

    def _admitted(self) -> list[int]:
        numbers = []
        while n := self._may_admit():
            numbers.append(number := self.state.number)
            self.state.number += 1
            ids = self.state.rounds[number] = [self.buffer.ledger.admit() for _ in range(n)]
            for group_id in ids:
                group = self.make(group_id)
                group.admitted = now()
                self.buffer.admit(group, version=self.version)
        return numbers

    def _may_admit(self) -> int:
        s = self.state
        if not self.in_steps:
            left = (self.steps - self.version) * self.groups
            return max(min(self.room, left) - self.buffer.outstanding, 0)
        if s.rounds or s.step >= min(self.version + self.buffer.max_staleness + 1, self.steps):
            return 0
        if not s.tried:
            return math.ceil(self.groups * (1 + (self.over_sampling or 0)))
        missing = self.groups - s.kept
        return min(math.ceil(missing * s.tried / max(s.kept, 1)), self.groups)

    async def _sampled(self, number: int) -> None:
        ids = list(self.state.rounds[number])
        groups = [self.buffer.entries[i].group for i in ids]
        done: list[int] = []
        async with contextlib.aclosing(self.sampler.groups(groups)) as places:
            async for place in places:
                if self.in_steps and not self.early_abort:
                    done.append(ids[place])
                    continue
                self._decide(number, [ids[place]])
                if self.early_abort and self.state.kept == self.groups:
                    break
        self._decide(number, sorted(done))
        if self.state.rounds[number]:
            await self.sampler.abort()
            for group_id in self.state.rounds[number]:
                self.buffer.discard(group_id, OVERSAMPLED)
        del self.state.rounds[number]
        self._next_step()
        self._decided.set()

    def _decide(self, number: int, ended: Sequence[int]) -> None:
        self.state.tried += len(ended)
        for group_id in ended:
            if not self.buffer.entries[group_id].group.accepted:
                self.buffer.discard(group_id, FILTERED)
            elif self.in_steps and self.state.kept == self.groups:
                self.buffer.discard(group_id, OVERSAMPLED)
            else:
                self.state.kept += 1
                self.buffer.put(group_id)
            self.state.rounds[number].remove(group_id)
        if not self.in_steps:
            self._next_step()

    def _next_step(self) -> None:
        s = self.state
        if s.kept >= self.groups:
            s.step, s.kept, s.tried = s.step + 1, s.kept - self.groups, 0
        elif s.tried >= self.max_rounds * self.groups:
            raise RuntimeError(
                f"step {s.step}: only {s.kept} of {self.groups} groups were kept after {s.tried} prompts, and the "
                f"others were discarded: raise rollout.max_rounds above {self.max_rounds}, or lower "
                "simulation.discarded"
            )
