"""Sampled groups for training: a background task fills the buffer, each step takes the oldest groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from miles_like import spans
from miles_like.loop.buffer import DataBuffer, Taken
from miles_like.loop.producer import Producer
from miles_like.records import ColumnsLostError, SampleRecord
from miles_like.report.progress import PhaseBar
from miles_like.stopping import StopRequest
from miles_like.types import SampleGroup

NO_MORE = "the prompts ended"
SHOWN_EVERY_S = 1.0  # the number of complete groups


class Step(Protocol):
    """The record of a step (loop.recorder.StepRecord)."""

    @property
    def step(self) -> int: ...
    @property
    def metrics(self) -> Mapping[str, float]:
        """Of what is trained."""


R = TypeVar("R", bound=Step)


@dataclass(slots=True, kw_only=True)
class Feed:
    """The groups of a run's steps. Call `take` inside of `sampling`; an exception of the producer is raised by the call
    that waits for the producer."""

    buffer: DataBuffer
    producer: Producer
    stop: StopRequest
    progress: PhaseBar
    _sampling: asyncio.Task[None] | None = field(default=None, init=False)

    @contextlib.asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Context: runs the producer concurrently with the body, and cancels it at the end."""
        self._sampling = task = asyncio.create_task(self.producer.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def take(self, step: int) -> list[Taken] | None:
        """The groups that `step` trains. None: a stop is requested, or too few prompts are left for a step."""
        if self.stop.asked:
            return None
        self.progress.phase(step, "rollout")
        producer, needed = self._task, self.producer.groups
        taking = asyncio.create_task(self.buffer.take(needed, version=step))
        stopping = asyncio.create_task(self.stop.wait())
        try:
            waits = {taking, stopping, producer}
            while not (await asyncio.wait(waits, timeout=SHOWN_EVERY_S, return_when=asyncio.FIRST_COMPLETED))[0]:
                self.progress.groups(self.producer.complete, needed)
            if producer.done():
                producer.result()
                if not taking.done() and self.buffer.enough(needed, version=step):
                    await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)  # `take` has its groups
            return taking.result() if taking.done() else None
        finally:
            taking.cancel()
            stopping.cancel()

    async def use(self, record: R, train: Callable[[R, list[Taken]], Awaitable[None]]) -> bool:
        """Trains the groups of `record.step`; False: there are none, as where `take` returns None. Where workers have
        lost some of them before anything was trained, others are taken."""
        while (taken := await self._waited_for(record.step)) is not None:
            try:
                await train(record, taken)
                return True
            except ColumnsLostError as e:
                if record.metrics or not any(e.has_lost(t.group) for t in taken):  # a part of the step is trained
                    raise
                await self.give_back(taken, e.has_lost)
        return False

    async def _waited_for(self, step: int) -> list[Taken] | None:
        with spans.span("rollout", step=step + 1, version=step) as span:
            taken = await self.take(step)
            span.add(groups=0 if taken is None else len(taken))
        return taken

    def ready(self, step: int) -> bool:
        """Whether `take` would return groups at once."""
        return not self.stop.asked and self.buffer.enough(self.producer.groups, version=step)

    async def drain(self) -> None:
        """Where groups are sampled step by step, waits until the samples that a full step discarded have ended, so that
        their abort does not reach an evaluation. Outside of `sampling` no sample is in flight, and it returns at
        once."""
        if not self.producer.in_steps or self._sampling is None or self._sampling.cancelled():
            return
        draining = asyncio.create_task(self.producer.drain())
        await asyncio.wait({draining, self._task}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done() and self._task.exception() is not None:
            draining.cancel()
            self._task.result()
        await draining

    def published(self, version: int) -> None:
        """Call when the servers have weights `version`: the step's groups count as trained, and further prompts are
        admitted."""
        self.producer.published(version)

    async def lose(self, is_lost: Callable[[SampleGroup], bool]) -> None:
        """Discards the groups that wait and are lost; their prompts are sampled again."""
        if prompts := await self.buffer.lose(is_lost):
            self.producer.lost(prompts)

    async def lose_of(self, holder: int) -> None:
        """Call when a rollout worker has ended: as `lose`, of the groups that it held."""
        await self.lose(lambda group: any(isinstance(s, SampleRecord) and s.holder == holder for s in group.samples))

    async def give_back(self, taken: Sequence[Taken], is_lost: Callable[[SampleGroup], bool]) -> None:
        """Groups that `take` returned and that were not trained: those that are lost are discarded and sampled again,
        the others wait for the next `take`."""
        await self.buffer.give_back(taken)
        await self.lose(is_lost)

    async def discard_rest(self) -> None:
        """Discards the groups that are left when the prompts have ended."""
        await self.buffer.discard_all(NO_MORE)

    def metrics(self) -> dict[str, float]:
        """Groups that were discarded since the run began, that are sampled or scored now, that wait for the others of
        their round, and that wait for a step."""
        ready = len(self.buffer)
        waiting = self.producer.complete - ready
        return {
            "async/dropped": float(sum(self.buffer.dropped.values())),
            "perf/queue/in_flight": float(self.buffer.in_flight - waiting),
            "perf/queue/waiting": float(waiting),
            "perf/queue/ready": float(ready),
        }

    @property
    def _task(self) -> asyncio.Task[None]:
        if self._sampling is None:
            raise RuntimeError("Feed.take requires `async with feed.sampling()`, outside of which nothing is sampled")
        return self._sampling
