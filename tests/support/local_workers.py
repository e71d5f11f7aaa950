"""Rollout workers in the process that calls them: what a Ray actor gets is pickled and opened again on the way.

A worker can be ended in the middle of its calls, as a kill of its process ends it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_like.batch import parcel
from miles_like.batch.parcel import Parcel
from miles_like.cluster.workers.link import Answered, StoreFullError, WorkerEnded
from miles_like.cluster.workers.worker import RolloutWorker, SamplingFactory
from miles_like.types import SampleGroup


@dataclass
class Left:
    """Bytes that a store has room for."""

    nbytes: float = math.inf


class InMemory:
    """Objects of a process's own memory. An object can be lost. left: where several share one store."""

    def __init__(self, left: Left | None = None) -> None:
        self.lost: set[int] = set()  # by id
        self._left = left or Left()

    def put(self, value: Parcel[SampleGroup]) -> Parcel[SampleGroup]:
        return self.put_all([value])[0]

    def put_all(self, values: Sequence[Parcel[Any]]) -> Sequence[Parcel[Any]]:
        """None of them where not all have room."""
        if math.isinf(self._left.nbytes):
            return values
        sizes = [len(pickle.dumps(one)) for one in values]
        if sum(sizes) > self._left.nbytes:
            raise StoreFullError(f"{self._left.nbytes:.0f} bytes are left")
        self._left.nbytes -= sum(sizes)
        for value, nbytes in zip(values, sizes, strict=True):
            weakref.finalize(value, self._back, nbytes)
        return values

    def _back(self, nbytes: int) -> None:
        self._left.nbytes += nbytes

    def get(self, reference: Parcel[SampleGroup]) -> Parcel[SampleGroup]:
        if id(reference) in self.lost:
            raise LookupError("the store has lost it")
        return reference


class LocalLink:
    """A Link to a worker in this process. slow_s: how long each of its answers takes; left: in its store."""

    def __init__(
        self,
        number: int,
        factory: SamplingFactory,
        urls: Sequence[str],
        slow_s: float = 0.0,
        left: Left | None = None,
    ) -> None:
        self.number, self.objects, self.worker, self.slow_s = number, InMemory(left), RolloutWorker(), slow_s
        self.worker.start(number, factory, urls, self.objects)
        self._ended = asyncio.Event()
        self._sent: set[asyncio.Task[Any]] = set()

    async def call(self, method: str, *arguments: Any) -> Any:
        return _travelled(await self._answer(getattr(self.worker, method), *arguments))

    def send(self, method: str, *arguments: Any) -> None:
        if not self._ended.is_set():
            self._sent.add(task := asyncio.create_task(getattr(self.worker, method)(*_travelled(arguments))))
            task.add_done_callback(self._sent.discard)

    async def exchange(
        self, method: str, *arguments: Any, keys: Sequence[int] = (), sent: Sequence[Any] = (), count: int = 0
    ) -> tuple[Answered, Sequence[Any]]:
        """sent: parcels of other workers here, and pickled ones of ranks (local_parts.SealingRank)."""
        values = [(_opened(one) if isinstance(one, bytes) else one).value for one in sent]
        answer, given = await self._answer(functools.partial(self.worker.exchange, method, keys, values), *arguments)
        assert len(given) == count
        return _travelled(answer), self.objects.put_all([Parcel(x) for x in given])

    def end(self) -> None:
        """Also the worker's tasks: nothing of it goes on."""
        self._ended.set()
        for share in self.worker._shares.values():
            share.task.cancel()

    async def _answer(self, method: Callable[..., Any], *arguments: Any) -> Any:
        ended = asyncio.create_task(self._ended.wait())
        call = asyncio.ensure_future(method(*_travelled(arguments)))
        try:
            await asyncio.sleep(self.slow_s)
            done, _ = await asyncio.wait({ended, call}, return_when=asyncio.FIRST_COMPLETED)
            if ended in done:
                raise WorkerEnded("it was killed")
            return call.result()
        finally:
            for task in (ended, call):
                task.cancel()
            await asyncio.gather(ended, call, return_exceptions=True)


def _opened(sealed: bytes) -> Parcel[Any]:
    """By a worker, which is in the process of a driver that opens nothing."""
    refused_by, parcel._refused_by = parcel._refused_by, None
    try:
        found: Parcel[Any] = pickle.loads(sealed)
        return found
    finally:
        parcel._refused_by = refused_by


def _travelled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, 5))


class LocalWorkers:
    """A StartWorker. slow_s: as of LocalLink, of each slot; capacity: of the store that all workers share."""

    def __init__(
        self,
        urls: Sequence[Sequence[str]],
        factory: SamplingFactory,
        slow_s: Sequence[float] = (),
        capacity: float = math.inf,
    ) -> None:
        self.urls, self._factory, self._slow_s = urls, factory, slow_s
        self.links: list[LocalLink] = []
        self._left = Left(capacity)

    def store(self, slot: int) -> int:
        return 0

    async def __call__(self, slot: int, number: int) -> LocalLink:
        slow_s = self._slow_s[slot] if self._slow_s else 0.0
        self.links.append(link := LocalLink(number, self._factory, self.urls[slot], slow_s, self._left))
        return link
