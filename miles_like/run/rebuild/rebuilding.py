"""The part of a run that survives losses of ranks: from its last checkpoint, on ranks that are started for it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from typing import Protocol, Self

from rich.console import Console

from miles_like.checkpoint.random_state import random_state, set_random_state
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.protocols import LossFn
from miles_like.report.console import note
from miles_like.run.rebuild.budget import RebuildBudget
from miles_like.run.rebuild.layout import named, plan_on_rest, servers_of
from miles_like.run.rebuild.lives import lost_ranks_error, run_through_losses
from miles_like.run.rebuild.ranks import RunRanks, start_ranks
from miles_like.run.setup.launcher import Launcher
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.run.setup.trainer_side import Resumed, RunFiles
from miles_like.run.watched.orders import GoingBack
from miles_like.types import Json, RanksLostError


class Rows(Protocol):
    """What writes the rows of metrics (miles_like.loop.recorder, miles_like.supervised.steps)."""

    once: Mapping[str, float]  # of the next step's row only
    earlier_s: float  # seconds that were spent before


class RebuildingRun(ABC):
    """A `Life` of a run."""

    files: RunFiles
    launcher: Launcher
    console: Console
    resumed: Resumed | None

    life = 0  # how often ranks were rebuilt before
    lost: RanksLostError | None = None  # that ends this life
    _random: Json = None  # of the driver, as a run without a checkpoint begins with again
    _budget = RebuildBudget(0, 1.0)
    _lost_at = 0.0  # of the life before, by time.perf_counter

    @property
    @abstractmethod
    def loss(self) -> LossFn:
        """Of the trainer."""

    @property
    @abstractmethod
    def ranks(self) -> Sequence[RayTrainer]:
        """Of all roles."""

    @abstractmethod
    def attach(self, ranks: RunRanks) -> None:
        """Begins a life with these ranks."""

    @abstractmethod
    async def run(self) -> None:
        """As `Life.run`; closes all that it has made."""

    async def move(self, plan: ModelPlan, lost: Collection[int]) -> None:
        """Takes the plan of the next life, whose ranks are about to start. lost: numbers of the servers that it has no
        more."""
        self.files.plan = plan

    def begin_again(self) -> None:
        """From the first step: there is no checkpoint."""
        set_random_state(self._random)

    async def through_losses(self) -> None:
        """Runs, again on rebuilt ranks where some are lost, up to cluster.rebuilds times. Raises as `run` and
        `run_through_losses`."""
        c = self.files.plan.config.cluster
        self._random = random_state()
        self._budget = RebuildBudget(c.rebuilds, c.rebuild_window_s)
        await run_through_losses(self, self._budget, self.say)

    async def next(self) -> Self:
        """As `Life.next`."""
        began = time.perf_counter()
        await asyncio.to_thread(RunRanks(*self.ranks).end)
        if (fence := self.files.plan.fence) is not None:
            fence.advance()  # ranks of a node that was cut off, and may come back, write nothing more
        plan, gone = await asyncio.to_thread(self._without_lost_nodes)
        await self.move(plan, gone)
        if plan.config.trace.on:
            self.files.traces.ask(self.launcher.clocks(plan))  # also of nodes that are in the place of others
        if (resumed := self.files.resume()) is None:
            self.begin_again()
        if fence is not None:
            fence.begins(self.files.first)
        life = copy(self)
        life.life, life.resumed = self.life + 1, resumed
        life.lost, life._lost_at, life.files.ends = None, began, True
        life.attach(await asyncio.to_thread(start_ranks, self.launcher, plan, self.loss, life.life))
        return life

    async def back(self, going: GoingBack) -> Self:
        """As `Life.back`."""
        raise going  # a run without alerts never goes back

    async def end_ranks(self) -> None:
        """Ends the ranks of all roles."""
        for one in self.ranks:
            await one.close()

    def _without_lost_nodes(self) -> tuple[ModelPlan, Collection[int]]:
        """The plan, once nodes that are lost were replaced or left out, and the numbers of the servers that were there.
        Raises as `plan_on_rest`."""
        before = self.files.plan
        lost, replaced = self.launcher.replace_lost_nodes(before)
        used = {slot.node for slot in before.placement.slots}
        lost &= used  # others were left out before
        if not lost | replaced:
            return before, ()
        if replaced:
            self.say(f"{named(replaced)} lost; another is in the place of each")
        plan, gone = plan_on_rest(before, lost, replaced), servers_of(before.placement, lost | replaced)
        if gone:
            numbers = sorted(gone)
            self.say(f"Rollout servers {', '.join(map(str, numbers))} were there; the others go on")
        if lost:
            p, was = plan.config.parallel, before.config.parallel
            rounding = "" if p == was else "; from here on results equal those of the other layout but for rounding"
            self.say(
                f"{named(lost)} lost: the trainer goes on with parallel.dp = {p.dp} (was {was.dp}), "
                f"parallel.ep = {p.ep} (was {was.ep}){rounding}"
            )
        return plan, gone

    def goes_on(self, error: BaseException) -> bool:
        """Whether another life follows one that ends with `error`."""
        return isinstance(error, GoingBack) or (
            self._budget.left and (self.lost is not None or lost_ranks_error(error) is not None)
        )

    def go_on(self, rows: Rows, first: int) -> None:
        """Call before step `first` of a life. After a loss notes the seconds since the boundary at which this life
        begins: they are lost."""
        now = time.perf_counter()
        lost_s = now - self.files.boundaries.setdefault(first, now)
        if self.life:
            rows.once = {"perf/rebuilds": float(self.life), "perf/lost_s": lost_s}
            rows.earlier_s += lost_s
            self.say(
                f"Trainer ranks were rebuilt within {now - self._lost_at:.1f} s: step {first + 1} is next; with the "
                f"steps that are trained again {lost_s:.1f} s are lost"
            )

    def say(self, text: str) -> None:
        note(self.console, text)
