"""The loop, on one page.

Two tasks meet at the buffer. `produce` waits for a permit, asks the servers for one step's worth of groups, scores them
and puts them into the buffer. `run` takes the oldest groups, trains on them, publishes the new weights, and only then
gives the permit back. With 1 + max_staleness permits, a group is never trained more than max_staleness versions after
its first token was sampled; with max_staleness = 0 there is one permit, and the loop is the synchronous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from miles_like.protocols import Algorithm, MetricSink, Trainer
from miles_like.types import Prompt, SampleGroup, TrainBatch


@dataclasses.dataclass(kw_only=True)
class Controller:
    """The parts, behind seams; every one of them has a fake in the tests."""

    trainer: Trainer
    algorithm: Algorithm
    next_prompts: Callable[[], Sequence[Prompt]]  # one step's worth
    rollout: Callable[[Sequence[Prompt]], Awaitable[Sequence[SampleGroup]]]  # sampled and scored
    pack: Callable[[Sequence[SampleGroup], Sequence[Sequence[float]]], TrainBatch]
    deal: Callable[[int, list[list[float]]], list[list[float]]]  # (step, advantages) -> advantages; a control shuffles
    evaluate: Callable[[int], Awaitable[Mapping[str, float]]]  # at a weight version
    describe: Callable[[int, Sequence[SampleGroup]], Mapping[str, float]]  # the rollout's own metrics
    keep: Callable[[int, Sequence[SampleGroup]], None]  # readable samples to disk
    save: Callable[[int], Awaitable[None]]  # checkpoint after a step
    sink: MetricSink
    max_staleness: int
    eval_every: int  # 0: only before the first and after the last step
    save_every: int  # 0: only after the last step

    async def run(self, *, first: int, steps: int) -> None:
        """Steps first .. steps-1; step s trains weight version s and ends in version s + 1."""
        ready: asyncio.Queue[tuple[Sequence[SampleGroup], float]] = asyncio.Queue()
        permits = asyncio.Semaphore(1 + self.max_staleness)
        self.sink.write(first, {"weight_version": float(first), **await self.evaluate(first)})
        async with _background(self._produce(permits, ready)) as producer:
            for step in range(first, steps):
                began = time.perf_counter()
                groups, rollout_s = await _first_of(ready.get(), producer)
                metrics = await self._train(step, groups)
                last = step + 1 == steps
                # the permit goes back after publish, and after an evaluation that must see these weights alone
                if last or (self.eval_every and (step + 1) % self.eval_every == 0):
                    metrics |= await self.evaluate(step + 1)
                step_s = time.perf_counter() - began + (rollout_s if self.max_staleness else 0.0)
                metrics |= {"weight_version": float(step + 1), "perf/rollout_s": rollout_s, "perf/step_s": step_s}
                self.sink.write(step + 1, metrics)
                self.keep(step + 1, groups)
                if last or (self.save_every and (step + 1) % self.save_every == 0):
                    await self.save(step + 1)
                permits.release()

    async def _produce(self, permits: asyncio.Semaphore, ready: asyncio.Queue) -> None:
        while True:
            await permits.acquire()
            began = time.perf_counter()
            groups = await self.rollout(self.next_prompts())
            await ready.put((groups, time.perf_counter() - began))

    async def _train(self, step: int, groups: Sequence[SampleGroup]) -> dict[str, float]:
        metrics = dict(self.describe(step, groups))
        advantages = self.deal(step, [list(self.algorithm.advantages(g)) for g in groups])
        began = time.perf_counter()
        report = await self.trainer.step(self.pack(groups, advantages))
        trained = time.perf_counter()
        published = await self.trainer.publish(version=step + 1)
        return (
            metrics
            | dict(report.metrics)
            | {
                "perf/train_s": trained - began,
                "perf/publish_s": time.perf_counter() - trained,
                "perf/pause_s": published.pause_seconds,
                "sync/bytes": float(published.bytes),
                "sync/seconds": published.seconds,
            }
        )


@contextlib.asynccontextmanager
async def _background(coroutine):
    task = asyncio.ensure_future(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


async def _first_of(wanted, producer: asyncio.Task):
    """`wanted`, unless the producer dies first: then its exception."""
    task = asyncio.ensure_future(wanted)
    await asyncio.wait({task, producer}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        return task.result()
    task.cancel()
    return producer.result()
