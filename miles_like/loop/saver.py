"""Saves a run at the boundaries of its steps and ends it on a stop request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from miles_like import spans
from miles_like.checkpoint.writer import RunCheckpoints, Snapshot
from miles_like.report.progress import PhaseBar
from miles_like.stopping import Deadline, StopRequest


class Stateful(Protocol):
    """An object whose state can be saved between two steps."""

    async def snapshot(self, step: int, whole: bool) -> Snapshot:
        """State after `step` steps. whole: include the samples in flight on the servers, which are aborted first."""


class Orders(Protocol):
    """What alerts have ordered, to be done at the boundary of a step (miles_like.run.watched.orders)."""

    @property
    def goes_back(self) -> bool: ...
    @property
    def pauses(self) -> bool: ...
    def go_back(self, step: int, snapshot: Snapshot) -> NoReturn:
        """Raises GoingBack, with which the loop ends."""

    async def pause(self, step: int) -> None:
        """Returns when the run is to go on."""


@dataclass(slots=True, kw_only=True)
class Saver:
    """Saves the state at step boundaries.

    every: steps between two checkpoints; 0: only after the last step. models_first: the models are saved before the
    publication of their weights, because they sleep afterwards; otherwise at the boundary.
    """

    state: Stateful
    checkpoints: RunCheckpoints
    stop: StopRequest
    deadline: Deadline
    progress: PhaseBar
    every: int
    models_first: bool = False
    orders: Orders | None = None  # None: there are no alerts
    _step: int = field(default=0, init=False)  # steps done at the last boundary
    _snapshot: Snapshot | None = field(default=None, init=False)  # there; None: nothing to save yet
    _saved: int = field(default=0, init=False)  # steps done in the last checkpoint that was begun
    _since: float = field(default_factory=time.perf_counter, init=False)  # the last boundary

    def begin(self, step: int) -> None:
        """Record the first boundary of this process, after `step` steps; there is nothing to save."""
        self._step = self._saved = step
        self._since = time.perf_counter()

    def passed(self, step_s: float) -> None:
        """Note a step whose boundary is not saved. step_s: its duration in seconds, for the deadline."""
        self.deadline.note(step_s=step_s)
        self._since = time.perf_counter()

    async def before_publication(self, step: int) -> None:
        """Call when `step` steps are trained, before their weights are published."""
        if self.models_first and self.due(step):
            self.progress.phase(step, "save")
            await self._finish(wait=True)
            await self.checkpoints.save_models(step)

    async def boundary(self, step: int, *, last: bool, step_s: float | None = None) -> None:
        """Call after `step` steps. Saves every `every` steps, after the last one, on a stop request and before a pause;
        raises GoingBack, unsaved, where an alert orders it. A checkpoint may be unfinished when this returns, except
        after the last step. step_s: duration of the step in seconds, for the deadline; None: the time since the last
        boundary."""
        due = last or self.due(step)
        self._step, self._snapshot = step, await self.state.snapshot(step, due)
        if self.orders is not None and self.orders.goes_back:
            await self._finish(wait=True)
            self.orders.go_back(step, self._snapshot)
        if due:
            await self._save()
        await self._finish(wait=last or self._ordered)
        if self.orders is not None and self.orders.pauses:
            await self.orders.pause(step)
        now = time.perf_counter()
        self.deadline.note(step_s=now - self._since if step_s is None else step_s)
        self._since = now

    async def end(self, steps: int) -> int:
        """Saves the last boundary if it is not saved, waits for a complete checkpoint, and returns the steps done.
        Raises Stopped where these are fewer than `steps` because of a stop request."""
        if self._saved != self._step:
            await self._save()
        await self._finish(wait=True)
        if self._step < steps and self.stop.asked:
            raise self.stop.stopped(self._step or None)
        return self._step

    async def flush(self) -> None:
        """Checks the state as it is now and writes the ledger, without a checkpoint."""
        await self.state.snapshot(self._step, False)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is written after `step` steps."""
        return self._ordered or bool(self.every and step % self.every == 0)

    @property
    def _ordered(self) -> bool:
        """Whether the run ends, waits or goes back at the next boundary."""
        return self.stop.asked or (self.orders is not None and (self.orders.pauses or self.orders.goes_back))

    async def _save(self) -> None:
        self.progress.phase(self._step, "save")
        if self._snapshot is None:
            raise RuntimeError(f"step {self._step} is saved before a boundary was reached")
        with spans.span("checkpoint", step=self._step):
            await self._finish(wait=True)
            await self.checkpoints.begin(self._step, self._snapshot)
            await self._finish(wait=not self.checkpoints.asynchronous)
        self._saved = self._step

    async def _finish(self, *, wait: bool) -> None:
        seconds = await self.checkpoints.finish(wait=wait)
        if seconds is not None:
            self.deadline.note(save_s=seconds)
