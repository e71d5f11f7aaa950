"""The loop, on one page.

Two tasks meet at the buffer. `produce` waits for a permit and puts one step's worth of groups, sampled and scored, into
the buffer (rounds.py). `run` takes the oldest groups, trains on them, publishes the new weights, and only then
gives the permit back. With 1 + max_staleness permits, a group is never trained more than max_staleness versions after
its first token was sampled; with max_staleness = 0 there is one permit, and the loop is the synchronous one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from miles_like.algorithms.mismatch import finish
from miles_like.buffer import DataBuffer
from miles_like.metrics import speed_metrics
from miles_like.protocols import Algorithm, MetricSink, Trainer
from miles_like.rounds import Produced, Rounds
from miles_like.types import SampleGroup, TrainBatch

T = TypeVar("T")
Advantages = list[list[float | Tensor]]  # of each group's samples: a number, or one for each token


async def _as_they_are(groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
    """Nobody else is asked about the tokens."""
    return groups


async def _no_critic(step: int, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
    """Nothing learns but the trainer."""
    return {}


def _admit(step: int, metrics: Mapping[str, float]) -> None:
    """Any step will do."""


@dataclasses.dataclass(kw_only=True)
class Controller:
    """The parts, behind seams; every one of them has a fake in the tests."""

    trainer: Trainer
    algorithm: Algorithm
    buffer: DataBuffer
    rounds: Rounds
    pack: Callable[[Sequence[SampleGroup], Sequence[Sequence[float]]], Sequence[TrainBatch]]  # one an optimizer step
    deal: Callable[[int, Advantages], Advantages]  # (step, advantages) -> advantages; a control shuffles
    evaluate: Callable[[int], Awaitable[Mapping[str, float]]]  # at a weight version
    describe: Callable[[int, Sequence[SampleGroup]], Mapping[str, float]]  # the rollout's own metrics
    keep: Callable[[int, Sequence[SampleGroup]], None]  # readable samples to disk
    # checkpoint after a step, whose prompts end with so many dealt; it may still be under way when this returns
    save: Callable[[int, int], Awaitable[None]]
    finish_save: Callable[[bool], Awaitable[None]]  # complete it if it is written, or (True) wait until it is
    phase: Callable[[int, str], None]  # what is going on, for a progress bar
    sink: MetricSink
    max_staleness: int
    eval_every: int  # 0: only before the first and after the last step
    save_every: int  # 0: only after the last step
    speed: Callable[..., Mapping[str, float]] = speed_metrics  # (groups, rollout_s=, train_s=)
    judge: Callable[[int, Mapping[str, float]], None] = _admit  # of a step not yet published; RuntimeError ends the run
    experience: Callable[[Sequence[SampleGroup]], Awaitable[Sequence[SampleGroup]]] = _as_they_are  # others' words
    learn: Callable[[int, Sequence[SampleGroup]], Awaitable[Mapping[str, float]]] = _no_critic  # beside the trainer

    async def run(self, *, first: int, steps: int) -> None:
        """Steps first .. steps-1; step s trains on weight version s and ends in version s + 1."""
        started = time.perf_counter()
        permits = asyncio.Semaphore(1 + self.max_staleness)
        took: asyncio.Queue[tuple[Produced, float]] = asyncio.Queue()  # with the seconds of each rollout, in order
        self.sink.write(first, {"weight_version": float(first), **await self._evaluate(first)})
        async with _background(self._produce(first, permits, took)) as producer:
            for step in range(first, steps):
                began = time.perf_counter()
                self.phase(step, "rollout")
                made, rollout_s = await _unless_dead(took.get(), producer)
                groups = await self.buffer.take(made.groups, version=step)
                metrics = {**made.metrics, **await self._train(step, groups)}
                metrics |= {"perf/rollout_s": rollout_s, "perf/step_s": time.perf_counter() - began}
                metrics |= self.speed(groups, rollout_s=rollout_s, train_s=metrics["perf/train_s"])
                metrics |= {"async/dropped": float(sum(self.buffer.dropped.values()))}
                done, last = step + 1, step + 1 == steps
                if last or (self.eval_every and done % self.eval_every == 0):
                    metrics |= await self._evaluate(done)
                wall = {"wall_s": time.perf_counter() - started}
                self.sink.write(done, {"weight_version": float(done), **wall, **metrics})
                if last or (self.save_every and done % self.save_every == 0):
                    self.phase(step, "save")
                    await self.save(done, made.dealt)
                await self.finish_save(last)
                permits.release()  # the next prompts see the weights just published

    async def _produce(
        self, first: int, permits: asyncio.Semaphore, took: asyncio.Queue[tuple[Produced, float]]
    ) -> None:
        for step in itertools.count(first):
            await permits.acquire()
            began = time.perf_counter()
            made = await self.rounds.produce(step)
            await took.put((made, time.perf_counter() - began))

    async def _train(self, step: int, groups: Sequence[SampleGroup]) -> dict[str, float]:
        asked, described = time.perf_counter(), self.describe(step, groups)
        told = await self.experience(groups)
        advantages = self.deal(step, [list(a) for a in self.algorithm.advantages(told)])
        began = time.perf_counter()
        self.phase(step, "train")
        report = await self.trainer.train(self.pack(told, advantages))
        metrics = finish(report.metrics) | await self.learn(step, told)
        trained = time.perf_counter()
        self.keep(step + 1, groups)  # as sampled, and first: who stops the run over them wants to see them
        self.judge(step + 1, metrics)
        self.phase(step, "publish")
        published = await self.trainer.publish(version=step + 1)
        return {
            **described,
            **metrics,
            "perf/experience_s": began - asked,
            "perf/train_s": trained - began,
            "perf/publish_s": time.perf_counter() - trained,
            "perf/pause_s": published.pause_seconds,
            "sync/bytes": float(published.bytes),
            "sync/seconds": published.seconds,
        }

    async def _evaluate(self, version: int) -> Mapping[str, float]:
        self.phase(version, "evaluate")
        return await self.evaluate(version)


@contextlib.asynccontextmanager
async def _background(work: Coroutine[object, object, None]) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _unless_dead(wanted: Coroutine[object, object, T], producer: asyncio.Task[None]) -> T:
    """`wanted`; when the producer ends first, its exception."""
    task = asyncio.create_task(wanted)
    await asyncio.wait({task, producer}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        producer.result()
    return await task


def settle() -> None:
    """What is loaded by now stays: the garbage collector looks at it once more and never again. Each of its full passes
    over the modules of Ray, torch and transformers would cost a good part of a short iteration."""
    gc.collect()
    gc.freeze()
