"""The training loop.

`Feed` samples and scores groups in the background. Each step takes the oldest groups, trains on them and publishes the
new weights; only then are further prompts admitted. With buffer.max_staleness = 0 the loop is therefore synchronous.

At the boundary of two steps the state of every object is known without a request to a server: a checkpoint holds it.
After a stop request the state at the last boundary is saved; within a step, the step is completed first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles_like.batch.packer import Packer
from miles_like.experience.experience import Experience
from miles_like.loop.evaluation import Evaluator
from miles_like.loop.feed import Feed
from miles_like.loop.recorder import Recorder, StepRecord
from miles_like.loop.saver import Saver
from miles_like.protocols import ServerChecks, Trainer
from miles_like.types import SampleGroup


@dataclass(kw_only=True)
class Controller:
    """One run. Override `step` for another data flow: docs/examples/two_passes.py."""

    feed: Feed
    experience: Experience
    packer: Packer
    trainer: Trainer
    checks: ServerChecks
    recorder: Recorder
    evaluator: Evaluator
    saver: Saver

    async def run(self, *, first: int, steps: int, resumed: bool = False) -> None:
        """Runs steps first .. steps - 1, fewer where the prompts end; step s trains on weights s and publishes s + 1.
        Raises Stopped on a stop request, once the state is saved."""
        self.recorder.start()
        if not resumed:
            self.recorder.write_first(first, await self.evaluator.figures(first))
        self.saver.begin(first)
        async with self.feed.sampling():
            for step in range(first, steps):
                record = self.recorder.begin(step)
                if not await self.feed.use(record, lambda r, taken: self.step(r, self.recorder.sampled(r, taken))):
                    break
                await self.after(record, last=step + 1 == steps)
            await self.settle()
        done = await self.saver.end(steps)
        if done < steps:  # the prompts have ended: what is left is discarded, and the last weights are evaluated
            await self.feed.discard_rest()
            self.recorder.write_end(done, await self.evaluator.figures(done))
            await self.saver.flush()

    async def step(self, record: StepRecord, groups: Sequence[SampleGroup]) -> None:
        """Trains on `groups` and publishes the new weights."""
        with record.timed("checks"):
            await self.checks.before_training(record.step)
        with record.timed("experience"):
            scored = await self.experience.score(groups)  # by the reference, the critic and the teachers
            advantages = await self.experience.advantages(record.step, scored)
            record.columns = await self.experience.columns(record.step, groups, advantages)
        with record.timed("train"):
            report = await self.trainer.train(self.packer.steps(scored, advantages))
            record.trained(report)  # before the critic's: what workers lose from here on cannot be trained again
            record.metrics |= await self.experience.learn(scored)
        self.recorder.check(record)
        await self.publish(record)

    async def publish(self, record: StepRecord) -> None:
        """The last part of each `step`: publishes its weights and checks the servers."""
        done = record.step + 1
        with record.timed("save"):
            await self.saver.before_publication(done)
        await self.feed.drain()
        with record.timed("checks"):
            await self.checks.before_publication()
        with record.timed("publish"):
            published = await self.trainer.publish(version=done)
        with record.timed("checks"):
            record.published, metrics = await self.checks.published(done, published)
            record.metrics |= metrics

    async def after(self, record: StepRecord, *, last: bool) -> None:
        """Evaluates, records and saves; then admits prompts for the weights just published."""
        done = record.step + 1
        row = self.recorder.row(record, self.feed.metrics())
        if self.evaluator.due(done, last=last):
            row |= await self.evaluator.figures(done)
        self.recorder.write_step(record, row)
        await self.saver.boundary(done, last=last)
        self.feed.published(done)

    async def settle(self) -> None:
        """Waits for background work after the last step. This loop has none."""
