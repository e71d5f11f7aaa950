"""The loop, on one page.

Two tasks meet at the buffer. `Producer.run` keeps groups under way, sampled and scored (producer.py). `Controller.run`
takes the oldest, trains on them, publishes the new weights, and only then makes room for others. With max_staleness = 0
the next prompts wait for the new weights, and the loop is the synchronous one.

Between two steps, at their boundary, everything that the run needs to go on is known without asking anybody: that is
what is saved. Told to stop while it waits for samples, the loop saves the last boundary, for the trainer has not moved
since; told in the middle of a step, it ends the step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from miles_like.algorithms.mismatch import finish
from miles_like.buffer import DataBuffer, Taken
from miles_like.ledger import Ledger
from miles_like.loop_state import Snapshot
from miles_like.metrics import speed_metrics
from miles_like.producer import Producer
from miles_like.protocols import Algorithm, MetricSink, Trainer
from miles_like.stopping import Deadline, StopRequest
from miles_like.tally import Rewards, total
from miles_like.types import PublishReport, SampleGroup, TrainBatch

T = TypeVar("T")
Advantages = list[list[float | Tensor]]  # of each group's samples: a number, or one for each token


async def _as_they_are(groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
    """Nobody else is asked about the tokens."""
    return groups


async def _no_critic(step: int, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
    """Nothing learns but the trainer."""
    return {}


NO_MORE = "the prompts ended"


class _Boundary(NamedTuple):
    """Between two steps."""

    step: int  # steps done
    state: Snapshot | None


async def _not_compared(step: int, report: PublishReport) -> None:
    """The servers are taken to agree with the trainer."""


async def _not_inspected(step: int) -> None:
    """The servers are taken to hold what was published to them."""


def _not_observed(rewards: Sequence[Rewards]) -> None:
    """Prompts are dealt as if nothing were known of them."""


def _admit(step: int, metrics: Mapping[str, float]) -> None:
    """Any step will do."""


@dataclasses.dataclass(kw_only=True)
class Controller:
    """The parts, behind seams; every one of them has a fake in the tests."""

    trainer: Trainer
    algorithm: Algorithm
    buffer: DataBuffer
    producer: Producer
    ledger: Ledger
    pack: Callable[[Sequence[SampleGroup], Sequence[Sequence[float]]], Sequence[TrainBatch]]  # one an optimizer step
    deal: Callable[[int, Advantages], Advantages]  # (step, advantages) -> advantages; a control shuffles
    evaluate: Callable[[int], Awaitable[Mapping[str, float]]]  # at a weight version
    describe: Callable[[int, Sequence[SampleGroup]], Mapping[str, float]]  # the rollout's own metrics
    keep: Callable[[int, Sequence[SampleGroup]], None]  # readable samples to disk
    # the ledger is checked and written, and the loop's own state known; (True) with what is in flight at the servers
    snapshot: Callable[[int, bool], Awaitable[Snapshot]]
    save: Callable[[int, Snapshot], Awaitable[None]]  # checkpoint after a step; may still be under way when it returns
    finish_save: Callable[[bool], Awaitable[None]]  # complete it if it is written, or (True) wait until it is
    phase: Callable[[int, str], None]  # what is going on, for a progress bar
    sink: MetricSink
    eval_every: int  # 0: only before the first and after the last step
    save_every: int  # 0: only after the last step
    stop: StopRequest
    deadline: Deadline
    speed: Callable[..., Mapping[str, float]] = speed_metrics  # (groups, rollout_s=, train_s=)
    judge: Callable[[int, Mapping[str, float]], None] = _admit  # of a step not yet published; RuntimeError ends the run
    experience: Callable[[Sequence[SampleGroup]], Awaitable[Sequence[SampleGroup]]] = _as_they_are  # others' words
    observe: Callable[[Sequence[Rewards]], None] = _not_observed  # of the groups that a step trained or left out
    learn: Callable[[int, Sequence[SampleGroup]], Awaitable[Mapping[str, float]]] = _no_critic  # beside the trainer
    # of the servers: (steps trained) before the next one trains, and after a publication; RuntimeError ends the run
    inspect: Callable[[int], Awaitable[None]] = _not_inspected
    compare: Callable[[int, PublishReport], Awaitable[None]] = _not_compared

    async def run(self, *, first: int, steps: int, resumed: bool = False) -> None:
        """Steps first .. steps-1; step s trains on weight version s and ends in version s + 1. Fewer where the prompts
        end. Raises Stopped where the run was asked to stop, once its state is saved."""
        started = time.perf_counter()
        if not resumed:
            self.sink.write(first, {"weight_version": float(first), **await self._evaluate(first)})
        boundary = saved = _Boundary(first, None)  # there is nothing to save yet
        async with _background(self.producer.run()) as producer:
            for step in range(first, steps):
                began = time.perf_counter()
                if (taken := await self._take(step, producer)) is None:
                    break
                metrics = await self._step(step, taken, producer)
                done, last = step + 1, step + 1 == steps
                metrics |= self._speed(taken, metrics, time.perf_counter() - began)
                if last or (self.eval_every and done % self.eval_every == 0):
                    metrics |= await self._evaluate(done)
                self._account(done, taken)
                wall = {"wall_s": time.perf_counter() - started}
                self.sink.write(done, {"weight_version": float(done), **wall, **metrics, **self.ledger.metrics()})
                due = last or self.stop.asked or (self.save_every and done % self.save_every == 0)
                boundary = _Boundary(done, await self.snapshot(done, bool(due)))
                saved = await self._save(boundary) if due else saved
                await self.finish_save(last or self.stop.asked)
                self.deadline.note(step_s=time.perf_counter() - began)
                self.producer.published(done)  # the next prompts see the weights just published
        if saved.step != boundary.step:  # a step was waited for that did not come
            await self._save(boundary)
        await self.finish_save(True)
        if boundary.step == steps:
            return
        if self.stop.asked:
            raise self.stop.stopped(boundary.step or None)
        await self._end(boundary.step, time.perf_counter() - started)

    async def _take(self, step: int, producer: asyncio.Task[None]) -> list[Taken] | None:
        """The groups of a step; None: the run was asked to stop, or the prompts have ended."""
        if self.stop.asked:
            return None
        self.phase(step, "rollout")
        taking = asyncio.create_task(self.buffer.take(self.producer.groups, version=step))
        stopping = asyncio.create_task(self.stop.wait())
        try:
            await asyncio.wait({taking, stopping, producer}, return_when=asyncio.FIRST_COMPLETED)
            if producer.done():
                producer.result()
                if not taking.done() and self.buffer.enough(self.producer.groups, version=step):
                    await asyncio.wait({taking, stopping}, return_when=asyncio.FIRST_COMPLETED)  # it is being given out
            return taking.result() if taking.done() else None
        finally:
            taking.cancel()
            stopping.cancel()

    async def _end(self, done: int, wall_s: float) -> None:
        """There are not prompts enough for a further step: what is left over is discarded, what is there evaluated.

        After the last save: a run that is resumed from there comes to its end again, and writes the same.
        """
        await self.buffer.discard_all(NO_MORE)
        measured = {"wall_s": wall_s, **await self._evaluate(done)}
        self.sink.write(done, {"weight_version": float(done), **measured, **self.ledger.metrics()})
        await self.snapshot(done, False)

    async def _save(self, boundary: _Boundary) -> _Boundary:
        self.phase(boundary.step, "save")
        assert boundary.state is not None, "a step was done"
        await self.save(boundary.step, boundary.state)
        return boundary

    def _account(self, done: int, taken: Sequence[Taken]) -> None:
        for t in taken:
            self.ledger.train(done, t.ticket, t.group)
        self.observe([r for t in taken for r in t.tally.rewards])

    def _speed(self, taken: Sequence[Taken], metrics: Mapping[str, float], step_s: float) -> dict[str, float]:
        tally = total(t.tally for t in taken)
        rollout_s = tally.seconds or step_s  # where prompts are admitted freely there are always some under way
        times = {"perf/rollout_s": rollout_s, "perf/step_s": step_s}
        speed = self.speed([t.group for t in taken], rollout_s=rollout_s, train_s=metrics["perf/train_s"])
        return {**tally.metrics(), **times, **speed, "async/dropped": float(sum(self.buffer.dropped.values()))}

    async def _step(self, step: int, taken: Sequence[Taken], producer: asyncio.Task[None]) -> dict[str, float]:
        groups = [t.group for t in taken]
        inspected = time.perf_counter()
        await self.inspect(step)
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
        if self.producer.in_steps:  # what a full step gave up has ended too, and no abort comes into an evaluation
            await _unless_dead(self.producer.settle(), producer)
        settled = time.perf_counter()
        self.phase(step, "publish")
        published = await self.trainer.publish(version=step + 1)
        compared = time.perf_counter()
        await self.compare(step + 1, published)
        return {
            **described,
            **metrics,
            "perf/experience_s": began - asked,
            "perf/train_s": trained - began,
            "perf/publish_s": compared - settled,
            "perf/checks_s": asked - inspected + time.perf_counter() - compared,
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
    """`wanted`; when the producer fails first, its exception."""
    task = asyncio.create_task(wanted)
    await asyncio.wait({task, producer}, return_when=asyncio.FIRST_COMPLETED)
    if producer.done() and producer.exception() is not None:
        task.cancel()
        producer.result()
    return await task


def settle() -> None:
    """What is loaded by now stays: the garbage collector looks at it once more and never again. Each of its full passes
    over the modules of Ray, torch and transformers would cost a good part of a short iteration."""
    gc.collect()
    gc.freeze()
