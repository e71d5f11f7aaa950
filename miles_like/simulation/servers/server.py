"""One rollout server: continuous batching over a queue of prompts, as the engines do it.

A step feeds the prompts of newly started samples and samples one token of every running sample; the first token of a
sample comes from the pass that feeds its prompt. Between two changes of the batch all steps are alike, so they are one
event. Whatever reaches the server (prompts, a pause, an abort) takes effect between two steps.

Not modelled: turns of requests of different sizes (rollout/embedded/engine/fair_share.py), cached prefixes, preemption
where the cache is full.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from miles_like.simulation.clock.processors import Processors, Work
from miles_like.simulation.clock.timeline import ServerState, ServerTimeline
from miles_like.simulation.clock.virtual_time import now
from miles_like.simulation.inputs.assumptions import EngineAssumptions
from miles_like.simulation.inputs.settings import Capacity, decode_seconds
from miles_like.simulation.servers.samples import SimSample

PauseMode = Literal["abort", "retract", "in_place"]


@dataclass(slots=True, eq=False)
class Job:
    """A sample on a server. reply: set when it has ended or was aborted. before: its tokens when it was submitted.
    since: the server's step up to which the sample has its tokens."""

    sample: SimSample
    reply: asyncio.Future[None]
    before: list[tuple[int, int]]
    since: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """Waiting samples of the same tokens, which are fed once before the samples' next tokens."""

    jobs: deque[Job]
    tokens: int
    fed: bool = False


@dataclass(kw_only=True)
class Server:
    """One rollout server; `run` is the loop of its engine. version: of its weights."""

    capacity: Capacity
    engine: EngineAssumptions
    processors: Processors
    timeline: ServerTimeline
    version: int = 0
    generated: int = 0  # tokens
    _queue: deque[Entry] = field(default_factory=deque)
    _running: dict[Job, None] = field(default_factory=dict)
    _ends: list[tuple[int, int, Job]] = field(default_factory=list)  # heap: step after which a job ends, tie, job
    _begun: int = 0  # samples that were started
    _steps: int = 0  # taken
    _context: int = 0  # tokens of all running samples, prompts included
    _reserved: int = 0  # tokens of cache
    _paused: bool = False
    _down: bool = False  # it failed, and is being restarted
    _orders: list[tuple[Callable[[], None], asyncio.Future[None]]] = field(default_factory=list)
    _wake: asyncio.Future[None] | None = None  # while the engine can be interrupted

    def submit(self, samples: Sequence[SimSample]) -> list[asyncio.Future[None]]:
        """Queues samples of one prompt that have the same tokens so far; returns a reply for each."""
        loop = asyncio.get_running_loop()
        jobs = deque(Job(s, loop.create_future(), list(s.spans)) for s in samples)
        self._queue.append(Entry(jobs, samples[0].prompt_tokens + samples[0].tokens))
        self._note()
        if len(self._running) < self.capacity.slots and not self._blocked:
            self._interrupt()
        return [job.reply for job in jobs]

    async def pause(self, mode: PauseMode) -> None:
        """Returns between two steps, with the effect of publish.pause_mode on the samples."""

        def paused() -> None:
            self._paused = True
            if mode == "abort":
                self._abort(lambda _: True)
            elif mode == "retract":
                self._retract()

        await self._between_steps(paused)

    async def resume(self, version: int) -> None:
        """Continues with weights `version`."""

        def resumed() -> None:
            for job in self._running:  # paused in place
                self._credit(job)
            self.version, self._paused = version, False

        await self._between_steps(resumed)

    async def abort(self, samples: Collection[SimSample] | None = None) -> None:
        """Ends these samples with the tokens they have; None: all."""
        wanted = None if samples is None else set(samples)
        await self._between_steps(lambda: self._abort(lambda job: wanted is None or job.sample in wanted))

    async def fail(self, restart_s: float) -> None:
        """Ends all samples without the tokens that they got here, and takes no step for `restart_s` seconds."""

        def failed() -> None:
            self._down = True
            lost = [*self._running, *(job for entry in self._queue for job in entry.jobs)]
            self._abort(lambda _: True)
            for job in lost:
                job.sample.reset(job.before)

        await self._between_steps(failed)
        await asyncio.sleep(restart_s)
        self._down = False
        self._interrupt()

    @property
    def _blocked(self) -> bool:
        return self._paused or self._down

    async def run(self) -> None:
        """The engine's loop, which never ends."""
        while True:
            self._obey()
            started, tokens = ([], 0) if self._blocked else self._admit()
            self._note()
            if started:
                await self._first_step(started, tokens)
            elif self._running and not self._blocked:
                await self._decode()
            else:
                await self._woken()

    # ---- steps

    async def _first_step(self, started: list[Job], tokens: int) -> None:
        """The step that feeds prompts: it cannot be interrupted."""
        self._note(len(started))
        seconds = self.engine.prefill_s * tokens + self._decoding(1)
        await self.processors.run(seconds, self.engine.cores)
        for job in started:
            if job.sample.started is None:
                job.sample.started = now()
            self._start(job)
        self._take(1)

    async def _decode(self) -> None:
        """Steps until a sample ends or something reaches the server."""
        steps = self._next_end() - self._steps
        work = self.processors.begin(self._decoding(steps), self.engine.cores)
        await self._woken(work)
        if not work.done.done():
            elapsed = self.processors.stop(work)
            steps = self._entered(elapsed, steps)
            await self.processors.run(self._decoding(steps) - elapsed, self.engine.cores)
        self._take(steps)

    def _decoding(self, steps: int) -> float:
        return decode_seconds(self.engine, steps=steps, running=len(self._running), context=self._context)

    def _entered(self, elapsed: float, most: int) -> int:
        """The fewest steps that take at least `elapsed` seconds, at least 1."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._decoding(middle) >= elapsed else (middle + 1, high)
        return low

    def _take(self, steps: int) -> None:
        """`steps` steps are done; samples whose last token is among them end."""
        self._steps += steps
        self._context += steps * len(self._running)
        self.generated += steps * len(self._running)
        while self._running and self._next_end() <= self._steps:
            _, _, job = heapq.heappop(self._ends)
            self._remove(job)
            job.sample.ended = now()
            _answer(job)

    def _start(self, job: Job) -> None:
        job.since = self._steps
        self._running[job] = None
        self._context += job.sample.prompt_tokens + job.sample.tokens
        self._begun += 1
        heapq.heappush(self._ends, (self._steps + job.sample.left, self._begun, job))

    def _remove(self, job: Job) -> None:
        """Ends a running job, or returns it to the queue; its entry in `_ends` is skipped later."""
        self._credit(job)
        del self._running[job]
        self._context -= job.sample.prompt_tokens + job.sample.tokens
        self._reserved -= self._needs(job)

    def _credit(self, job: Job) -> None:
        """Gives the sample its tokens up to now."""
        if self._steps > job.since:
            job.sample.sampled(self._steps - job.since, self.version)
            job.since = self._steps

    def _next_end(self) -> int:
        """The step after which the next running sample ends."""
        while self._ends[0][2] not in self._running or self._ends[0][0] != self._end(self._ends[0][2]):
            heapq.heappop(self._ends)
        return self._ends[0][0]

    @staticmethod
    def _end(job: Job) -> int:
        return job.since + job.sample.left

    # ---- admission

    def _admit(self) -> tuple[list[Job], int]:
        """The samples that start, and the tokens to feed for them."""
        started: list[Job] = []
        tokens = 0
        while self._queue:
            entry = self._queue[0]
            late = not entry.fed and tokens and tokens + entry.tokens > self.capacity.prefill_tokens
            if late or not self._fits(entry.jobs[0], len(started)):
                break
            tokens, entry.fed = tokens + (0 if entry.fed else entry.tokens), True
            while entry.jobs and self._fits(entry.jobs[0], len(started)):
                job = entry.jobs.popleft()
                self._reserved += self._needs(job)
                started.append(job)
            if entry.jobs:
                break
            self._queue.popleft()
        return started, tokens

    def _fits(self, job: Job, started: int) -> bool:
        there = len(self._running) + started
        if there >= self.capacity.slots:
            return False
        return not there or self._reserved + self._needs(job) <= self.capacity.kv_tokens

    def _needs(self, job: Job) -> int:
        return self.capacity.reserved(job.sample.prompt_tokens, job.sample.length)

    # ---- between two steps

    def _retract(self) -> None:
        """Returns running samples to the front of the queue; their tokens are fed again."""
        for entry in self._queue:
            entry.fed = False
        back = list(self._running)
        for job in back:
            self._remove(job)
        entries = [Entry(deque([job]), job.sample.prompt_tokens + job.sample.tokens) for job in back]
        self._queue.extendleft(reversed(entries))

    def _abort(self, matches: Callable[[Job], bool]) -> None:
        ended = [job for job in self._running if matches(job)]
        for job in ended:
            self._remove(job)
        for entry in list(self._queue):
            ended += [job for job in entry.jobs if matches(job)]
            entry.jobs = deque(job for job in entry.jobs if not matches(job))
            if not entry.jobs:
                self._queue.remove(entry)
        for job in ended:
            _answer(job)

    async def _between_steps(self, change: Callable[[], None]) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._orders.append((change, done))
        self._interrupt()
        await done

    def _obey(self) -> None:
        orders, self._orders = self._orders, []
        for change, done in orders:
            change()
            if not done.done():
                done.set_result(None)

    async def _woken(self, work: Work | None = None) -> None:
        """Waits until something reaches the server, or until `work` ends."""
        if self._orders:
            return
        self._wake = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait(
                {self._wake, *([] if work is None else [work.done])}, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            self._wake = None

    def _interrupt(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _note(self, starting: int = 0) -> None:
        waiting = sum(len(entry.jobs) for entry in self._queue)
        running = len(self._running) + starting
        state: ServerState = "paused" if self._blocked else "busy"
        self.timeline.note(now(), state if running or waiting else "idle", running)


def _answer(job: Job) -> None:
    if not job.reply.done():
        job.reply.set_result(None)
