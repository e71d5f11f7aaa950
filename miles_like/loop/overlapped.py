"""The training loop with publish.during_training: servers load the weights of a step while the next step trains.

Trainer ranks write the weights; what follows needs servers only. It goes on beside the next step where that step's
groups are in the buffer already. At a boundary with a checkpoint, an evaluation or a check that asks the trainer the
loop waits, as `Controller` does at every boundary, so that a checkpoint holds the state between two steps. The order of
admissions, metrics and ledger is that of `Controller`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from miles_like.loop.controller import Controller
from miles_like.loop.recorder import StepRecord
from miles_like.types import PublishReport, SampleGroup


class Delivery(Protocol):
    """A publication in two parts (miles_like.run.setup.delivery)."""

    async def write(self, version: int) -> None:
        """The trainer's part: afterwards its weights may change. Raises RuntimeError."""

    async def load(self, version: int) -> PublishReport:
        """The servers' part, of the version written last. Raises RuntimeError."""


@dataclass(kw_only=True)
class OverlappedController(Controller):
    """The loop of a run whose publications `delivery` makes."""

    delivery: Delivery
    _loading: asyncio.Task[None] | None = field(default=None, init=False)  # beside the step that trains
    _unsaved: int | None = field(default=None, init=False)  # steps done, where a boundary was passed beside training

    async def run(self, *, first: int, steps: int, resumed: bool = False) -> None:
        """As `Controller.run`."""
        try:
            await super().run(first=first, steps=steps, resumed=resumed)
        finally:
            if self._loading is not None:
                self._loading.cancel()
                await asyncio.wait({self._loading})

    async def step(self, record: StepRecord, groups: Sequence[SampleGroup]) -> None:
        """As `Controller.step`. Raises what a load that fails meanwhile raises, without waiting for the training."""
        step = asyncio.ensure_future(super().step(record, groups))
        waited = {step} if self._loading is None else {step, self._loading}
        try:
            done, _ = await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if step not in done:
                await self._loaded()
            await step
        finally:
            step.cancel()
            await asyncio.wait({step})

    async def publish(self, record: StepRecord) -> None:
        """Writes the weights, once the servers have loaded the previous version."""
        await self._loaded()
        done = record.step + 1
        await self.feed.drain()
        with record.timed("checks"):
            await self.checks.before_publication()
        with record.timed("publish"):
            await self.delivery.write(done)

    async def after(self, record: StepRecord, *, last: bool) -> None:
        """Lets the servers load the weights, beside the next step where it can train already."""
        done = record.step + 1
        waits = last or self.saver.due(done) or self.evaluator.due(done, last=last) or self.checks.hold_training(done)
        if waits or not self.feed.ready(done):
            await self._load(record, beside_training=False)
            await super().after(record, last=last)
            self._unsaved = None
        else:
            self._unsaved = done
            self._loading = asyncio.create_task(self._beside(record))

    async def settle(self) -> None:
        """Waits until the servers have loaded the last version, then passes the boundary at which the run stops."""
        await self._loaded()
        if self._unsaved is not None:
            await self.saver.boundary(self._unsaved, last=False)
            self._unsaved = None

    async def _beside(self, record: StepRecord) -> None:
        done = record.step + 1
        await self._load(record, beside_training=True)
        self.recorder.write_step(record, self.recorder.row(record, self.feed.metrics()))
        self.recorder.ledger.flush(done)
        self.saver.passed(time.perf_counter() - record.began)
        self.feed.published(done)

    async def _load(self, record: StepRecord, *, beside_training: bool) -> None:
        done = record.step + 1
        with record.timed("publish"):
            published = await self.delivery.load(done)
        with record.timed("checks"):
            record.published, metrics = await self.checks.published(done, published, beside_training=beside_training)
            record.metrics |= metrics

    async def _loaded(self) -> None:
        if self._loading is not None:
            loading, self._loading = self._loading, None
            await loading


def loop_of(controller: type[Controller], *, during_training: bool) -> type[Controller]:
    """The loop of a run whose user chose `controller`. Raises ValueError for one that does not fit
    publish.during_training."""
    if not during_training or issubclass(controller, OverlappedController):
        return controller
    if controller is not Controller:
        raise ValueError(
            "publish.during_training = true requires a loop that publishes during training, but "
            f"{controller.__name__} publishes at the end of each step: derive it from "
            "miles_like.loop.overlapped.OverlappedController, or set publish.during_training = false"
        )
    return OverlappedController
