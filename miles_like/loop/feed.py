"""Sampled groups for training: a background task fills the buffer, each step takes the oldest groups."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from miles_like.loop.buffer import DataBuffer, Taken
from miles_like.loop.producer import Producer
from miles_like.report.progress import PhaseBar
from miles_like.stopping import StopRequest

NO_MORE = "the prompts ended"
SHOWN_EVERY_S = 1.0  # the number of complete groups


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

    async def discard_rest(self) -> None:
        """Discards the groups that are left when the prompts have ended."""
        await self.buffer.discard_all(NO_MORE)

    @property
    def dropped(self) -> int:
        """Groups discarded since the run began."""
        return sum(self.buffer.dropped.values())

    @property
    def _task(self) -> asyncio.Task[None]:
        if self._sampling is None:
            raise RuntimeError("Feed.take requires `async with feed.sampling()`, outside of which nothing is sampled")
        return self._sampling
