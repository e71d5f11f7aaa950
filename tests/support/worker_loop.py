"""A run's loop over rollout workers that make samples at once: producer, buffer, feed and ledger, and a trainer whose
only rank fills what it would train."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from rich.console import Console

from miles_like.algorithms.advantages.parts import with_streams
from miles_like.batch.packer import Packer
from miles_like.batch.parcel import Parcel
from miles_like.batch.portion import Portion, filled
from miles_like.checkpoint.ledger import Ledger
from miles_like.cluster.workers.pool import RolloutWorkers
from miles_like.cluster.workers.values import HeldValues
from miles_like.cluster.workers.worker import Sampling
from miles_like.loop.buffer import DataBuffer, Taken
from miles_like.loop.feed import Feed
from miles_like.loop.producer import Producer
from miles_like.records import PlannedBatch, PlannedMicroBatch, RecordGroup, SampleRecord
from miles_like.report.progress import PhaseBar
from miles_like.stopping import StopRequest
from miles_like.types import Prompt, SampleGroup, SamplingParams
from routing_replay.align import ShardSpec
from tests.support.made_samples import group, sample

PLACE = (0, ShardSpec(layers=(1, 2)))
ALL = "all rewards equal"


class Made:
    """What a worker samples with: groups of two, at once or where `gate` is open; each third prompt is refused."""

    version = 0  # that all servers have

    def __init__(self, gate: asyncio.Event | None = None) -> None:
        self.gate = gate
        self.running: set[str] = set()
        self.served: list[list[str]] = []  # URLs, as they change

    async def groups(
        self, round_index: int, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        self.running |= {p.id for p in prompts}
        for i, prompt in enumerate(prompts):
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
            yield i, SampleGroup(prompt=prompt, samples=made(prompt.id, self.version).samples)

    async def abort(self) -> None: ...

    @contextlib.asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        yield

    def state(self) -> Mapping[str, SampleGroup]:
        return {f"7/{p}": made(p) for p in sorted(self.running)[:1]}

    def restore(self, state: Mapping[str, SampleGroup]) -> None:
        self.running |= {name.partition("/")[2] for name in state}

    def serve(self, urls: Collection[str]) -> None:
        self.served.append(sorted(urls))

    def __call__(self, urls: Sequence[str]) -> Sampling:
        async def close() -> None: ...

        def refused(found: SampleGroup) -> str | None:
            return ALL if int(found.prompt.id) % 3 == 2 else None

        own: Any = Made(self.gate)

        async def answer(
            reward: str | None, prompts: Sequence[Prompt], *, n: int, params: SamplingParams
        ) -> Sequence[SampleGroup]:
            return [SampleGroup(prompt=p, samples=made(p.id).samples[:n]) for p in prompts]

        return Sampling(
            sampler=own, partial=own, serve=self.serve, filter=refused, answer=answer, work=one_more, close=close
        )


class OnUvloop(Made):
    """As its `Made`, in a process whose event loop is uvloop's."""

    async def groups(
        self, round_index: int, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        assert type(asyncio.get_running_loop()).__module__.startswith("uvloop")
        async for one in super().groups(round_index, prompts):
            yield one

    def __call__(self, urls: Sequence[str]) -> Sampling:
        return replace(super().__call__(urls), sampler=self)


class Large(Made):
    """Groups of 6 MB, in a stream of each sample."""

    async def groups(
        self, round_index: int, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        async for i, found in super().groups(round_index, prompts):
            wide = [replace(s, streams={FILLER: torch.ones(s.length, 750_000 // s.length)}) for s in found.samples]
            yield i, replace(found, samples=tuple(wide))

    def __call__(self, urls: Sequence[str]) -> Sampling:
        return replace(super().__call__(urls), sampler=self)


HALF, MORE, FILLER = "half", "more", "filler"  # streams


async def one_more(what: str, groups: Sequence[SampleGroup], *arguments: Any) -> Any:
    """A Work: the sum of the stream HALF of each sample, and one more for each of its tokens as the stream MORE."""
    numbers = [[float(s.streams[HALF].sum()) for s in g.samples] for g in groups]
    return with_streams(groups, MORE, [[s.streams[HALF] + 1 for s in g.samples] for g in groups]), numbers


def made(prompt_id: str, version: int = 0) -> SampleGroup:
    how: Any = {"routing": True, "version": version}
    return group([sample(prompt_id, i, first_token=100 * int(prompt_id) + i, reward=float(i), **how) for i in range(2)])


def contents(cells: Sequence[PlannedMicroBatch], *parcels: Parcel[Portion]) -> list[tuple[str, list[int]]]:
    """(name, inputs) of the samples of a rank's micro-batches, all of which have routes."""
    out = []
    for m in filled(cells, [parcel.value for parcel in parcels]):
        assert m.routing is not None
        ends = m.cu_seqlens.tolist()
        out += [(name, m.tokens[a:b].tolist()) for name, a, b in zip(m.samples, ends, ends[1:], strict=False)]
    return out


def streams(cells: Sequence[PlannedMicroBatch], *parcels: Parcel[Portion]) -> dict[str, dict[str, list[float]]]:
    """Name of each sample of a rank's micro-batches -> its streams."""
    out = {}
    for m in filled(cells, [parcel.value for parcel in parcels]):
        assert m.routing is None
        ends = m.cu_seqlens.tolist()
        for name, a, b in zip(m.samples, ends, ends[1:], strict=False):
            out[name] = {of: x[a:b].tolist() for of, x in m.streams.items()}
    return out


async def filled_here(cells: Sequence[PlannedMicroBatch], parcels: Sequence[Any]) -> list[tuple[str, list[int]]]:
    return contents(cells, *parcels)


@dataclass
class Loop:
    """A run's loop over `workers`, whose trainer fills the batch of its only rank."""

    start: Any  # a StartWorker
    groups: int = 3
    max_staleness: int = 0
    bound: int = 1 << 40
    lockstep: bool = False
    dealt: int = 0
    trained: list[str] = field(default_factory=list)
    fill: Callable[..., Any] = filled_here
    said: list[str] = field(default_factory=list)
    before_pull: Callable[[int], Any] = lambda step: None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int = 0
    done: set[tuple[int, int]] = field(default_factory=set)  # holder and key of what is trained

    def __post_init__(self) -> None:
        self.workers = RolloutWorkers(
            start=self.start, tokens=lambda prompt: 10, say=self.said.append, bound=self.bound
        )
        self.ledger = Ledger(None)
        self.buffer = DataBuffer(
            max_staleness=self.max_staleness, samples=2, ledger=self.ledger, release=self.workers.release
        )
        self.producer = Producer(
            groups=self.groups,
            buffer=self.buffer,
            source=self,
            sampler=self.workers,
            capacity=self.workers,
            lockstep=self.lockstep,
            max_rounds=10,
        )
        self.feed = Feed(
            buffer=self.buffer, producer=self.producer, stop=StopRequest(), progress=PhaseBar(9, Console())
        )
        self.workers.lost = self.feed.lose_of

    def take(self, n: int) -> list[Prompt]:
        self.dealt += n
        return [Prompt(id=str(i), token_ids=(1,), answer="") for i in range(self.dealt - n, self.dealt)]

    async def train(self, record: Loop, taken: list[Taken]) -> None:
        """One rank fills what it would train; every value is that of the sample that was made."""
        groups = [t.group for t in taken]
        assert all(isinstance(g, RecordGroup) for g in groups)
        (batch,) = Packer(dp_size=1, max_tokens=64).steps(groups, [[1.0, -1.0]] * len(groups))
        assert isinstance(batch, PlannedBatch)
        self.before_pull(self.step)
        pulled = await HeldValues(self.workers).pull(batch, [PLACE])
        for name, tokens in await self.fill(batch.grid[0], pulled.portions[PLACE]):
            prompt, index = name.split("/")
            assert tokens == made(prompt).samples[int(index)].token_ids[:-1].tolist()
        self.trained += [g.prompt.id for g in groups]

    async def run(self, steps: int) -> None:
        Made.version = 0
        await self.workers.begin()
        async with self.feed.sampling():
            for self.step in range(steps):
                taken: list[Taken] = []

                async def train(record: Loop, groups: list[Taken], own: list[Taken] = taken) -> None:
                    await self.train(record, groups)
                    own[:] = groups

                assert await asyncio.wait_for(self.feed.use(self, train), 120)
                await self.feed.drain()
                for t in taken:
                    self.ledger.train(self.step + 1, t.group_id, t.group)
                self.workers.release([t.group for t in taken])
                self.done |= keys_of([t.group for t in taken])
                assert await self.freed()
                self.ledger.check(self.buffer.group_ids)
                self.ledger.flush(self.step + 1)
                Made.version = self.step + 1
                self.feed.published(self.step + 1)
        await self.feed.discard_rest()

    async def freed(self) -> bool:
        """Whether nothing is held of what was trained; Ray's actors may begin calls in another order."""
        for _ in range(100):
            if not self.done & await self.held():
                return True
            await asyncio.sleep(0.05)
        return False

    async def held(self) -> set[tuple[int, int]]:
        return {(number, key) for number, keys in (await self.workers.held()).items() for key in keys}


def keys_of(groups: Sequence[SampleGroup]) -> set[tuple[int, int]]:
    return {(s.holder, s.key) for g in groups for s in g.samples if isinstance(s, SampleRecord)}
