"""One attempt of a simulated run: from its start, or from a checkpoint, to its end or to a fault.

The order of a step is that of miles_like/loop/controller.py.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from miles_like.simulation.clock.processors import Processors
from miles_like.simulation.clock.timeline import ServerTimeline, TrainerTimeline
from miles_like.simulation.clock.virtual_time import now
from miles_like.simulation.inputs.assumptions import Assumptions
from miles_like.simulation.inputs.lengths import AnswerSource, Purpose, stream
from miles_like.simulation.inputs.settings import Capacity, LoopSettings, train_seconds
from miles_like.simulation.loop.buffer import SimBuffer, SimEntry
from miles_like.simulation.loop.ledger import SimLedger
from miles_like.simulation.loop.producer import ProducerState, SimProducer
from miles_like.simulation.loop.turns import SimTurns
from miles_like.simulation.loop.waits import causes
from miles_like.simulation.servers.pool import Pool
from miles_like.simulation.servers.samples import SimGroup, SimSample
from miles_like.simulation.servers.server import Server


@dataclass(kw_only=True)
class SimState:
    """The content of a checkpoint. step: number of completed steps."""

    step: int = 0
    ledger: SimLedger = field(default_factory=SimLedger)
    entries: dict[int, SimEntry] = field(default_factory=dict)
    producer: ProducerState = field(default_factory=ProducerState)
    rows: list[StepRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Measurements of one step. Times are seconds since the run began. staleness: weight versions -> tokens trained."""

    step: int  # steps done after it
    began: float
    taken: float
    trained: float
    published: float
    waits: dict[str, float]  # cause -> seconds between `began` and `taken`
    groups: int
    samples: int
    tokens: int  # trained
    staleness: dict[int, int]

    def __deepcopy__(self, memo: object) -> StepRow:
        return self  # of a step that is done: nothing changes its dictionaries


@dataclass(kw_only=True)
class Attempt:
    """Runs one attempt. saved: the last complete checkpoint. state: the state at the start, which `run` changes."""

    settings: LoopSettings
    assumed: Assumptions
    answers: AnswerSource
    state: SimState
    trainer: TrainerTimeline
    timelines: Sequence[ServerTimeline]  # of the servers
    resumed: bool
    saved: SimState = field(default_factory=SimState)
    servers: list[Server] = field(default_factory=list)
    _saving: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        s, a = self.settings, self.assumed
        self.saved = copy.deepcopy(self.state)
        self.processors = Processors(cores=math.inf if a.cores is None else a.cores)
        capacity = Capacity.of(s, a.engine)
        self.servers = [
            Server(
                capacity=capacity,
                engine=a.engine,
                processors=self.processors,
                timeline=timeline,
                version=self.state.step,
            )
            for timeline in self.timelines
        ]
        self.pool = Pool(settings=s, engine=a.engine, reward=a.reward, servers=self.servers, processors=self.processors)
        self.buffer = SimBuffer(
            max_staleness=s.max_staleness,
            backfill=s.in_flight_at_publication,
            mask_old_tokens=s.mask_old_tokens,
            ledger=self.state.ledger,
            entries=self.state.entries,
        )
        self.producer = SimProducer(
            groups=s.groups,
            buffer=self.buffer,
            sampler=self.pool,
            make=self._group,
            lockstep=s.lockstep,
            over_sampling=s.over_sampling,
            steps=s.steps,
            max_rounds=s.max_rounds,
            version=self.state.step,
            state=self.state.producer,
        )
        self.turns = SimTurns(
            enabled=s.takes_turns,
            times=a.turns,
            pool=self.pool,
            timeline=self.trainer,
            in_steps=self.producer.in_steps,
            drain=self.producer.drain,
            publish=self._publish,
        )

    async def run(self) -> None:
        """Raises RuntimeError as `SimProducer.run`."""
        background: list[asyncio.Task[None]] = []
        try:
            async with asyncio.TaskGroup() as tasks:
                background += [tasks.create_task(server.run()) for server in self.servers]
                await self.turns.begin()
                if not self.resumed:
                    await self._evaluate(0)
                background.append(tasks.create_task(self.producer.run()))
                while self.state.step < self.settings.steps:
                    await self._step()
                for task in background:
                    task.cancel()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            if self._saving is not None:
                self._saving.cancel()

    async def _step(self) -> None:
        began, step = now(), self.state.step
        with self.trainer.phase("samples"):
            await self.turns.serving()
            groups = await self.buffer.take(self.settings.groups, version=step)
        taken = now()
        await self._timed("checks", self.assumed.checks_s)
        await self.turns.training()
        await self._timed("experience", self.assumed.experience_s, self._cores(None))
        await self._timed("train", self._train_seconds(groups), self._cores(self.assumed.train.cores))
        trained = now()
        if self.producer.in_steps:
            with self.trainer.phase("settle"):
                await self.producer.drain()
        self.state.step = step + 1
        await self.turns.published()
        spans = [span for g in groups for span in g.spans()]
        staleness = Counter[int]()
        for version, n in spans:
            staleness[step - version] += n
        for g in groups:
            self.state.ledger.train(g.group_id, step)
        self.state.rows.append(
            StepRow(
                step=step + 1,
                began=began,
                taken=taken,
                trained=trained,
                published=now(),
                waits=causes(groups, began, taken),
                groups=len(groups),
                samples=sum(g.needed for g in groups),
                tokens=sum(n for _, n in spans),
                staleness=dict(staleness),
            )
        )
        await self._boundary()

    async def _boundary(self) -> None:
        """Between two steps: evaluation, checkpoint; then prompts are admitted."""
        s, done = self.settings, self.state.step
        last = done == s.steps
        if last or (s.eval_every and done % s.eval_every == 0):
            await self._evaluate(done)
        await self._timed("other", self.assumed.other_s)
        if last or (s.save_every and done % s.save_every == 0):
            with self.trainer.phase("save"):
                await self._save(last)
        self.producer.published(done)

    async def _save(self, last: bool) -> None:
        if self.producer.state.rounds:
            async with self.pool.suspended():
                state = self._snapshot()
        else:
            state = self._snapshot()
        await self.turns.training()
        if self._saving is not None:
            await self._saving
        a = self.assumed
        if not self.settings.save_asynchronous:
            await asyncio.sleep(a.save_s)
            self.saved = state
            return
        await asyncio.sleep(min(a.save_copy_s, a.save_s))
        self._saving = asyncio.create_task(self._written(state, max(a.save_s - a.save_copy_s, 0.0)))
        if last:
            await self._saving

    async def _written(self, state: SimState, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.saved = state

    def _snapshot(self) -> SimState:
        return copy.deepcopy(self.state)

    async def _publish(self) -> None:
        """The weights of the steps done."""
        publish = self.assumed.publish
        cores = self._cores(publish.cores)
        await self._timed("publish", publish.seconds - publish.pause_s, cores)
        with self.trainer.phase("publish"):
            await asyncio.gather(*(server.pause(self.settings.pause_mode) for server in self.servers))
        await self._timed("publish", publish.pause_s, cores)
        await asyncio.gather(*(server.resume(self.state.step) for server in self.servers))

    async def _evaluate(self, step: int) -> None:
        if not (self.assumed.evaluated and self.settings.eval_every):
            return
        with self.trainer.phase("evaluate"):
            await self.turns.serving()
            random = stream(self.settings.seed, Purpose.EVALUATION, step)
            drawn = [self.answers.draw(random, 1) for _ in range(self.assumed.evaluated)]
            await self.pool.evaluate([SimSample(prompt_tokens=d.prompt_tokens, length=d.lengths[0]) for d in drawn])

    async def _timed(self, phase: str, seconds: float, cores: float = 1.0) -> None:
        with self.trainer.phase(phase):  # type: ignore[arg-type]
            await self.processors.run(seconds, cores)

    def _cores(self, given: float | None) -> float:
        return float(self.settings.ranks) if given is None else given

    def _train_seconds(self, groups: Sequence[SimGroup]) -> float:
        inputs = [s.prompt_tokens + s.tokens - 1 for g in groups for s in g.complete]
        return train_seconds(
            self.assumed.train,
            inputs,
            shards=self.settings.shards,
            micro_batch_tokens=self.settings.micro_batch_tokens,
        )

    def _group(self, group_id: int) -> SimGroup:
        s = self.settings
        drawn = self.answers.draw(stream(s.seed, Purpose.LENGTHS, group_id), s.samples + self.assumed.spare_samples)
        accepted = stream(s.seed, Purpose.FILTER, group_id).random() >= self.assumed.discarded
        return SimGroup(
            group_id=group_id,
            samples=[SimSample(prompt_tokens=drawn.prompt_tokens, length=n) for n in drawn.lengths],
            needed=s.samples,
            accepted=accepted,
        )
