"""A run with rollout servers that survives losses of ranks: its servers stay."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Self

from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.fleet.fleet import Fleet
from miles_like.protocols import Algorithm, LossFn
from miles_like.run.rebuild.ranks import RunRanks
from miles_like.run.rebuild.rebuilding import RebuildingRun
from miles_like.run.setup.fleet import RunningServers, run_fleet
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.run.setup.prompts import Prompts
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.turn_taking import release_servers
from miles_like.run.watched.going_back import go_back, times_back
from miles_like.run.watched.orders import GoingBack, Orders
from miles_like.stopping import BY_ALERT, Stopped
from miles_like.types import Json
from rollout.episodes.runner import EpisodeRunner


class RunWithServers(RebuildingRun):
    """A `Life` of a run that samples."""

    prompts: Prompts
    rollout: RolloutSide
    servers: RunningServers
    algorithm: Algorithm
    reference: RayTrainer | None
    _ranks: dict[str, RayTrainer]  # of every model that is trained
    runner: EpisodeRunner
    orders: Orders  # of this life

    fleet: Fleet | None = None  # of all lives; None: all servers serve, and the run ends with the first that fails
    _urls: Mapping[int, str] = {}  # of the servers without a fleet, by their numbers
    _unread: Mapping[str, Json] = {}  # the state of the prompts as a run without a checkpoint begins with again

    @property
    def urls(self) -> Mapping[int, str]:
        """Of the servers, by their numbers: also of those that do not serve now and may again."""
        return self._urls if self.fleet is None else {s.number: s.url for s in self.fleet.roster if s.url}

    @property
    def loss(self) -> LossFn:
        return self.algorithm.loss

    @property
    def ranks(self) -> Sequence[RayTrainer]:
        return [one for one in (*self._ranks.values(), self.reference) if one is not None]

    async def with_servers(self, urls: Sequence[str]) -> None:
        """`through_losses` with the servers at `urls`, which are watched all the while; then closes the rewards. Raises
        as `through_losses` and `Fleet.beside`."""
        self._urls, self._unread = dict(enumerate(urls)), self.prompts.source.state()
        version = self.resumed.state.weight_version if self.resumed else 0
        self.fleet = run_fleet(self.rollout, self.servers, urls, version, self.say)
        try:
            lives = self.through_losses()
            await (lives if self.fleet is None else self.fleet.beside(lives))
        finally:
            await self.prompts.rewards.close()

    async def move(self, plan: ModelPlan, lost: Collection[int]) -> None:
        await super().move(plan, lost)
        self.rollout = replace(self.rollout, plan=plan)
        self.runner = self.rollout.episode_runner()
        self._urls = {number: url for number, url in self._urls.items() if number not in lost}
        if self.fleet is not None:
            self.fleet.lose(lost, "its node is lost")
        if plan.config.takes_turns:
            await release_servers(self.rollout, [*self._urls.values()])

    def begin_again(self) -> None:
        super().begin_again()
        self.prompts.source.restore(self._unread)

    async def back(self, going: GoingBack) -> Self:
        """As `Life.back`. The ranks stay where they are and load the checkpoint, but where they take turns with the
        servers: they may sleep then, and are started again."""
        files, most = self.files, self.rollout.plan.config.alerts.rollbacks
        count = await asyncio.to_thread(times_back, files.plan.run_dir) + 1
        new = await asyncio.to_thread(go_back, files, going)
        again = f"step {new} has the weights of step {going.to}, the best checkpoint"
        if count > most:
            done = f"{again}; the run ends, since it went back {count} times (alerts.rollbacks = {most})"
        else:
            done = f"{again}; its prompts are sampled again under other seeds ({count} of {most} times)"
        path = self.orders.note(going.event, done)
        self.say(done)
        if count > most:
            await self.end_ranks()
            raise Stopped(f"{going.event.sentence}; {done}; see {path}", BY_ALERT)
        if self.rollout.plan.config.takes_turns:
            return await self.next()
        resumed = await asyncio.to_thread(files.resume)
        life = copy(self)
        life.resumed, life.runner = resumed, self.rollout.episode_runner()
        life.lost, life.files.ends = None, True
        life.attach(RunRanks(**self._ranks, reference=self.reference))
        return life
