"""The part of a run that survives losses of ranks: from its last checkpoint, on ranks that are started for it."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, Self

from rich.console import Console

from miles_like.checkpoint.random_state import random_state, set_random_state
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.fleet.fleet import Fleet
from miles_like.loop.recorder import Recorder
from miles_like.protocols import Algorithm
from miles_like.report.console import note
from miles_like.rewards.load import Rewards
from miles_like.run.rebuild.budget import RebuildBudget
from miles_like.run.rebuild.layout import named, plan_on_rest, servers_of
from miles_like.run.rebuild.lives import lost_ranks_error, run_through_losses
from miles_like.run.rebuild.ranks import RunRanks, start_ranks
from miles_like.run.setup.fleet import RunningServers, run_fleet
from miles_like.run.setup.launcher import Launcher
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.trainer_side import Resumed, RunFiles
from miles_like.run.setup.turn_taking import release_servers
from miles_like.types import Json, RanksLostError
from rollout.episodes.runner import EpisodeRunner
from rollout.prompts.mix import PromptSource


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a run without a checkpoint begins with again."""

    prompts: Mapping[str, Json]  # the state of their source
    random: Json  # as `random_state`


class Prompts(Protocol):
    """The prompts of a run and their rewards (miles_like.run.train)."""

    @property
    def source(self) -> PromptSource: ...
    @property
    def rewards(self) -> Rewards: ...


class RebuildingRun(ABC):
    """A `Life` of a run."""

    prompts: Prompts
    rollout: RolloutSide
    servers: RunningServers
    algorithm: Algorithm
    files: RunFiles
    launcher: Launcher
    console: Console
    reference: RayTrainer | None
    _ranks: dict[str, RayTrainer]  # of every model that is trained
    resumed: Resumed | None
    runner: EpisodeRunner

    life = 0  # how often ranks were rebuilt before
    fleet: Fleet | None = None  # of all lives; None: all servers serve, and the run ends with the first that fails
    _urls: Mapping[int, str] = {}  # of the servers without a fleet, by their numbers
    lost: RanksLostError | None = None  # that ends this life
    _beginning: Beginning | None = None
    _budget = RebuildBudget(0, 1.0)
    _lost_at = 0.0  # of the life before, by time.perf_counter

    @abstractmethod
    def attach(self, ranks: RunRanks) -> None:
        """Begins a life with these ranks."""

    @abstractmethod
    async def run(self) -> None:
        """As `Life.run`; closes all that it has made."""

    @property
    def urls(self) -> Mapping[int, str]:
        """Of the servers, by their numbers: also of those that do not serve now and may again."""
        return self._urls if self.fleet is None else {s.number: s.url for s in self.fleet.roster if s.url}

    @property
    def ranks(self) -> Sequence[RayTrainer]:
        """Of all roles."""
        return [one for one in (*self._ranks.values(), self.reference) if one is not None]

    async def through_losses(self, urls: Sequence[str]) -> None:
        """Runs with the servers at `urls`, again on rebuilt ranks where some are lost, up to cluster.rebuilds times;
        then closes the rewards. The servers are watched all the while. Raises as `run`, `run_through_losses` and
        `Fleet.beside`."""
        c, self._urls = self.rollout.plan.config.cluster, dict(enumerate(urls))
        version = self.resumed.state.weight_version if self.resumed else 0
        self.fleet = run_fleet(self.rollout, self.servers, urls, version, self.say)
        self._beginning = Beginning(self.prompts.source.state(), random_state())
        self._budget = RebuildBudget(c.rebuilds, c.rebuild_window_s)
        try:
            lives = run_through_losses(self, self._budget, self.say)
            await (lives if self.fleet is None else self.fleet.beside(lives))
        finally:
            await self.prompts.rewards.close()

    async def next(self) -> Self:
        """As `Life.next`."""
        beginning = self._beginning
        assert beginning is not None, "set by `through_losses`"
        began = time.perf_counter()
        await asyncio.to_thread(RunRanks(*self.ranks).end)
        if (fence := self.rollout.plan.fence) is not None:
            fence.advance()  # ranks of a node that was cut off, and may come back, write nothing more
        self.rollout, gone = await asyncio.to_thread(self._without_lost_nodes)
        plan = self.files.plan = self.rollout.plan
        self._urls = {number: url for number, url in self._urls.items() if number not in gone}
        if self.fleet is not None:
            self.fleet.lose(gone, "its node is lost")
        if plan.config.trace.on:
            self.files.traces.ask(self.launcher.clocks(plan))  # also of nodes that are in the place of others
        if (resumed := self.files.resume()) is None:
            self.prompts.source.restore(beginning.prompts)
            set_random_state(beginning.random)
        if fence is not None:
            fence.begins(self.files.first)
        if plan.config.takes_turns:
            await release_servers(self.rollout, [*self._urls.values()])
        life = copy(self)
        life.life, life.resumed, life.runner = self.life + 1, resumed, self.rollout.episode_runner()
        life.lost, life._lost_at, life.files.ends = None, began, True
        start = partial(start_ranks, self.launcher, plan, self.algorithm.loss, life.life)
        life.attach(await asyncio.to_thread(start))
        return life

    def _without_lost_nodes(self) -> tuple[RolloutSide, Collection[int]]:
        """The rollout's side, once nodes that are lost were replaced or left out, and the numbers of the servers that
        were there. Raises as `plan_on_rest`."""
        before = self.rollout.plan
        lost, replaced = self.launcher.replace_lost_nodes(before)
        used = {slot.node for slot in before.placement.slots}
        lost &= used  # others were left out before
        if not lost | replaced:
            return self.rollout, ()
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
        return replace(self.rollout, plan=plan), gone

    def goes_on(self, error: BaseException) -> bool:
        """Whether another life follows one that ends with `error`."""
        return self._budget.left and (self.lost is not None or lost_ranks_error(error) is not None)

    def go_on(self, recorder: Recorder, first: int) -> None:
        """Call before step `first` of a life. After a loss notes the seconds since the boundary at which this life
        begins: they are lost."""
        now = time.perf_counter()
        lost_s = now - self.files.boundaries.setdefault(first, now)
        if self.life:
            recorder.once = {"perf/rebuilds": float(self.life), "perf/lost_s": lost_s}
            recorder.earlier_s += lost_s
            self.say(
                f"Trainer ranks were rebuilt within {now - self._lost_at:.1f} s: step {first + 1} is next; with the "
                f"steps that are trained again {lost_s:.1f} s are lost"
            )

    def say(self, text: str) -> None:
        note(self.console, text)
