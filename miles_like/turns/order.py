"""Whose turn it is on the devices that rollout servers and trainer ranks share.

One of the two sides has the memory at a time:

    SERVERS  the models sleep; the servers hold weights, KV cache and graphs; background sampling runs
       |     no samples in flight -> release all -> wake the models
    TRAINER  the servers hold nothing; the models are awake
       |     models to sleep -> resume weights -> publish -> resume KV cache and graphs
    SERVERS

A publication is part of each turn of the servers, since a server that released its weights has none. Users in the
foreground enter a side with `serving` or `training`; the turn changes only where it must, and waits until no user is on
the other side. Users of the same side are on it together. Background sampling never changes the turn: it waits while
the trainer has it. Concurrency: one event loop; a change holds a lock for which every entry waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol, get_args

from miles_like.protocols import TrainerRanks
from miles_like.types import PublishReport
from rollout.wire.bodies import MemoryTag

Part = Literal["drain", "release", "wake", "sleep", "resume"]
ALL = tuple(MemoryTag)
AFTER_WEIGHTS = (MemoryTag.KV_CACHE, MemoryTag.CUDA_GRAPH)  # resumed once the weights are there


class Side(Enum):
    """The two sides, of which one has the turn."""

    SERVERS = "servers"
    TRAINER = "trainer"


class Servers(Protocol):
    """All rollout servers of the run."""

    async def release(self, tags: Sequence[MemoryTag]) -> None: ...
    async def resume(self, tags: Sequence[MemoryTag]) -> None: ...
    def published(self) -> None:
        """All weights of every server have been replaced."""


class Sleeper(Protocol):
    """A model that is trained on the devices: the trainer, the critic."""

    async def sleep(self) -> Mapping[str, int]: ...
    async def wake(self) -> None: ...


class SleepingRanks(TrainerRanks, Sleeper, Protocol):
    """Trainer ranks that can sleep."""


class Publisher(Protocol):
    """The trainer, which publishes also while it sleeps."""

    async def publish(self, *, version: int) -> PublishReport: ...


class Background(Protocol):
    """Sampling that runs beside the loop."""

    async def close(self) -> None:
        """Returns once no request is in flight; further ones wait for `open`."""

    async def open(self) -> None: ...


@dataclass(kw_only=True)
class Turns:
    """Begins with the trainer's turn: the servers have released everything, the models are awake, sampling waits."""

    servers: Servers
    models: Sequence[Sleeper]
    publisher: Publisher
    background: Background
    _side: Side | None = Side.TRAINER  # None: a change was begun and not completed
    _version: int | None = None  # published last
    _changed: bool = False  # the trainer's weights are not those of `_version`
    _users: int = 0  # on `_side`
    _left: asyncio.Event = field(default_factory=asyncio.Event)  # set when the last user has left
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _seconds: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(get_args(Part), 0.0))
    _changes: int = 0

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Context in which the servers can be sent any request.

        Raises RuntimeError where the servers would need a publication that is due: before the first one, and after a
        training.
        """
        async with self._on(Side.SERVERS):
            yield

    @asynccontextmanager
    async def training(self, *, changes: bool = False) -> AsyncIterator[None]:
        """Context in which the models are awake. changes: the weights that are published may change in it."""
        async with self._on(Side.TRAINER):
            self._changed |= changes
            yield

    async def publish(self, *, version: int) -> PublishReport:
        """Publishes the trainer's weights; it is then the servers' turn."""
        async with self._lock:
            await self._no_users()
            with self._changing() as side:
                if side is Side.SERVERS:
                    await self._timed("drain", self.background.close())
                    await self._timed("release", self.servers.release(AFTER_WEIGHTS))
                else:
                    await self._to_sleep()
                report = await self._published(version)
        return report

    def metrics(self) -> dict[str, float]:
        """`perf/turn/...` since the last call: seconds by part, without publications, and the number of changes."""
        out = {f"perf/turn/{part}_s": seconds for part, seconds in self._seconds.items()}
        out["perf/turn/changes"] = float(self._changes)
        self._seconds, self._changes = dict.fromkeys(get_args(Part), 0.0), 0
        return out

    @asynccontextmanager
    async def _on(self, side: Side) -> AsyncIterator[None]:
        async with self._lock:
            if self._side is not side:
                await self._no_users()
                await _to_its_end(self._change(side))
            self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._left.set()

    async def _no_users(self) -> None:
        while self._users:
            self._left.clear()
            await self._left.wait()

    async def _change(self, side: Side) -> None:
        version = self._version
        if side is Side.TRAINER:
            with self._changing():
                await self._timed("drain", self.background.close())
                await self._timed("release", self.servers.release(ALL))
                for model in self.models:
                    await self._timed("wake", model.wake())
                self._side = side
            return
        if self._side is Side.TRAINER and (version is None or self._changed):
            why = "no weights were published" if version is None else f"the trainer has changed since version {version}"
            raise RuntimeError(
                f"the rollout servers have released their weights, and {why}: publish before sending requests to them"
            )
        with self._changing():
            assert version is not None
            await self._to_sleep()
            await self._published(version)

    async def _to_sleep(self) -> None:
        for model in self.models:
            await self._timed("sleep", model.sleep())
        await self._timed("resume", self.servers.resume([MemoryTag.WEIGHTS]))

    async def _published(self, version: int) -> PublishReport:
        report = await self.publisher.publish(version=version)
        self.servers.published()
        await self._timed("resume", self.servers.resume(AFTER_WEIGHTS))
        self._side, self._version, self._changed = Side.SERVERS, version, False
        await self.background.open()
        return report

    @contextmanager
    def _changing(self) -> Iterator[Side]:
        """Yields the side that has the turn. Raises RuntimeError where an earlier change was not completed."""
        if (side := self._side) is None:
            raise RuntimeError(
                "an earlier change of turns between rollout servers and trainer failed: see the first error"
            )
        self._side, self._changes = None, self._changes + 1
        yield side

    async def _timed(self, part: Part, work: Awaitable[object]) -> None:
        began = time.perf_counter()
        await work
        self._seconds[part] += time.perf_counter() - began


async def _to_its_end(change: Coroutine[None, None, None]) -> None:
    """Await a change that its user's time limit does not cut in two: the user is cancelled once it is complete."""
    task = asyncio.ensure_future(change)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
