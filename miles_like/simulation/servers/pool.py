"""Requests to the servers: groups are distributed by load, aborted samples are continued, complete groups are scored.

As rollout/episodes/{pool,groups,partial,resuming}.py and rollout/sglang/client.py do it. A request holds several
prompts where the groups of a round are used together, and one prompt otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

from miles_like.simulation.clock.processors import Processors
from miles_like.simulation.clock.virtual_time import now
from miles_like.simulation.inputs.assumptions import EngineAssumptions, RewardAssumptions
from miles_like.simulation.inputs.lengths import scoring_seconds
from miles_like.simulation.inputs.settings import LoopSettings
from miles_like.simulation.servers.samples import SimGroup, SimSample
from miles_like.simulation.servers.server import Server

ABORT_AGAIN_S = 0.1  # of rollout.episodes.partial


@dataclass(kw_only=True)
class Pool:
    settings: LoopSettings
    engine: EngineAssumptions
    reward: RewardAssumptions
    servers: Sequence[Server]
    processors: Processors
    _load: list[int] = field(default_factory=list)
    _driver: asyncio.Lock = field(default_factory=asyncio.Lock)
    _open: asyncio.Event = field(default_factory=asyncio.Event)  # cleared while suspended
    _idle: asyncio.Event = field(default_factory=asyncio.Event)  # no call is in flight
    _suspended: int = 0
    _calls: int = 0  # in flight

    def __post_init__(self) -> None:
        self._load = [0] * len(self.servers)
        self._open.set()

    async def groups(self, groups: Sequence[SimGroup]) -> AsyncGenerator[int, None]:
        """Yields the place of each group when it is complete and scored."""
        if not self.settings.prompt_per_request:
            await self._sampled(groups)
            await self._scored(groups)
            for place in range(len(groups)):
                yield place
            return

        ended: asyncio.Queue[int] = asyncio.Queue()

        async def whole(place: int) -> None:
            await self._sampled([groups[place]])
            await self._scored([groups[place]])

        tasks = [asyncio.create_task(whole(place)) for place in range(len(groups))]
        for place, task in enumerate(tasks):
            task.add_done_callback(lambda _, place=place: ended.put_nowait(place))  # type: ignore[misc]
        try:
            left = len(tasks)
            while left:
                done = [await ended.get()]
                while not ended.empty():
                    done.append(ended.get_nowait())
                left -= len(done)
                for place in sorted(done):
                    tasks[place].result()
                    yield place
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def abort(self) -> None:
        await asyncio.gather(*(server.abort() for server in self.servers))

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """Inside the context no sample of the background sampling is on a server."""
        await self.close()
        try:
            yield
        finally:
            self.open()

    async def close(self) -> None:
        """Aborts until no call is in flight: a request may reach a server after an abort."""
        self._suspended += 1
        self._open.clear()
        while self._calls:
            await self.abort()
            with suppress(TimeoutError):
                async with asyncio.timeout(ABORT_AGAIN_S):
                    await self._idle.wait()

    def open(self) -> None:
        self._suspended -= 1
        if not self._suspended:
            self._open.set()

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def evaluate(self, samples: Sequence[SimSample]) -> None:
        """Sample one answer to each prompt of an evaluation; scoring takes no time."""
        await self._request([[s] for s in samples], self.settings.prompts_per_request)
        await asyncio.gather(*(self._continued(s) for s in samples))

    async def _sampled(self, groups: Sequence[SimGroup]) -> None:
        """Until every group has the samples that it needs."""
        await self._open.wait()
        new = [g for g in groups if not any(s.tokens for s in g.samples)]
        together = 1 if self.settings.prompt_per_request else self.settings.prompts_per_request
        with self._call():
            await self._request([g.samples for g in new], together, needed=[g.needed for g in new])
        await asyncio.gather(*(self._complete(g) for g in groups))

    async def _complete(self, group: SimGroup) -> None:
        """Continues aborted samples. Spare ones that have not ended with the others were aborted."""
        missing = group.needed - len(group.complete)
        if missing > 0:
            unfinished = sorted((s for s in group.samples if s.ended is None), key=lambda s: -s.tokens)
            await asyncio.gather(*(self._continued(s) for s in unfinished[:missing]))

    async def _request(
        self, prompts: Sequence[Sequence[SimSample]], together: int, needed: Sequence[int] | None = None
    ) -> None:
        """Samples of each prompt, until all have ended or were aborted; with `needed` until so many of a prompt have,
        and its others are aborted. together: prompts of one request."""
        shares: list[list[int]] = [[] for _ in self.servers]
        costs = [p[0].prompt_tokens + len(p) * self.settings.limit for p in prompts]
        for i, cost in enumerate(costs):
            shares[self._assign(cost)].append(i)

        async def ask(e: int, share: Sequence[int]) -> None:
            for first in range(0, len(share), together):
                await self._drive(self.engine.request_s)
                for i in share[first : first + together]:
                    replies, wanted = self.servers[e].submit(prompts[i]), None if needed is None else needed[i]
                    waits.append(asyncio.create_task(self._replied(e, prompts[i], replies, wanted)))

        waits: list[asyncio.Task[None]] = []
        try:
            await asyncio.gather(*(ask(e, share) for e, share in enumerate(shares) if share))
            await asyncio.gather(*waits)
            await self._drive(self.engine.reply_s * sum(map(len, prompts)))
        finally:
            for wait in waits:
                wait.cancel()
            for e, share in enumerate(shares):
                self._load[e] -= sum(costs[i] for i in share)

    async def _replied(
        self, e: int, samples: Sequence[SimSample], replies: Sequence[asyncio.Future[None]], needed: int | None
    ) -> None:
        if needed is None or needed == len(samples):
            await asyncio.wait(replies)
            return
        waiting = set(replies)
        while waiting and sum(s.ended is not None for s in samples) < needed:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            await self.servers[e].abort(samples)

    async def _continued(self, sample: SimSample) -> None:
        while sample.ended is None:
            await self._open.wait()
            cost = sample.prompt_tokens + self.settings.limit
            e = self._assign(cost)
            try:
                with self._call():
                    await self._drive(self.engine.request_s)
                    await asyncio.wait(self.servers[e].submit([sample]))
            finally:
                self._load[e] -= cost

    async def _scored(self, groups: Sequence[SimGroup]) -> None:
        waits = (scoring_seconds(self.reward, self.settings.seed, g.group_id, g.needed) for g in groups)
        await asyncio.sleep(max(waits, default=0.0))
        for group in groups:
            group.scored = now()

    async def _drive(self, seconds: float) -> None:
        """Work of the driver, which has one thread."""
        if seconds:
            async with self._driver:
                await self.processors.run(seconds, 1.0)

    def _assign(self, cost: int) -> int:
        e = min(range(len(self._load)), key=self._load.__getitem__)
        self._load[e] += cost
        return e
