"""Rollout workers as Ray actors. The values that they hold are in Ray's object store, of which they own their part."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, ObjectStoreFullError, OutOfDiskError, RayActorError, RayError, RayTaskError

from miles_like.batch.parcel import Parcel
from miles_like.cluster.actors import Process
from miles_like.cluster.placement import Slot
from miles_like.cluster.run_nodes import RunNodes
from miles_like.cluster.workers.link import Answered, SentLostError, StoreFullError, WorkerEnded
from miles_like.cluster.workers.worker import RolloutWorker, SamplingFactory
from miles_like.nodes.waits import error_message
from miles_like.records import ColumnsLostError
from miles_like.types import SampleGroup

_FULL = (ObjectStoreFullError, OutOfDiskError)


class ObjectStore:
    """Ray's, as `Objects`."""

    def put(self, value: Parcel[SampleGroup]) -> Any:
        try:
            return ray.put(value)
        except _FULL as e:
            raise StoreFullError(_gist(e)) from None

    def get(self, reference: Any) -> Parcel[SampleGroup]:
        try:
            found: Parcel[SampleGroup] = ray.get(reference)
        except ObjectLostError as e:
            raise LookupError(f"Ray's object store has lost it ({type(e).__name__})") from None
        return found


class _Worker(Process):
    """The process of a rollout worker. Its calls run concurrently."""

    def start(self, number: int, factory: SamplingFactory, urls: Sequence[str]) -> None:
        self._worker = RolloutWorker()
        self._worker.start(number, factory, urls, ObjectStore())

    async def call(self, method: str, arguments: Sequence[Any]) -> Any:
        return await getattr(self._worker, method)(*arguments)

    async def exchange(
        self, method: str, arguments: Sequence[Any], keys: Sequence[int], count: int, *sent: Parcel[Any]
    ) -> Any:
        """The answer, or the error; then `count` parcels."""
        answer: Answered | Exception
        values: Sequence[Any]
        try:
            answer, values = await self._worker.exchange(method, keys, [parcel.value for parcel in sent], *arguments)
        except (ColumnsLostError, RuntimeError, ValueError) as e:
            answer, values = e, [None] * count
        return (answer, *map(Parcel, values)) if count else answer


@dataclass(frozen=True, slots=True)
class ActorLink:
    """A Link to the actor of a worker."""

    actor: Any

    async def call(self, method: str, *arguments: Any) -> Any:
        return await _answer(self.actor.call.remote(method, arguments))

    def send(self, method: str, *arguments: Any) -> None:
        self.actor.call.remote(method, arguments)

    async def exchange(
        self, method: str, *arguments: Any, keys: Sequence[int] = (), sent: Sequence[Any] = (), count: int = 0
    ) -> tuple[Answered, Sequence[Any]]:
        ask = self.actor.exchange.options(num_returns=1 + count)
        found = ask.remote(method, arguments, keys, count, *sent)
        status, *parcels = found if count else [found]
        answer: Answered | Exception = await _answer(status)
        if isinstance(answer, Exception):
            raise answer
        return answer, parcels

    def end(self) -> None:
        ray.kill(self.actor)


async def _answer(reference: Any) -> Any:
    try:
        return await reference
    except RayTaskError as e:
        if isinstance(e.cause, _FULL):
            raise StoreFullError(_gist(e.cause)) from None
        if isinstance(e.cause, ValueError | RuntimeError | OSError):
            raise e.cause from None
        raise RuntimeError(f"a rollout worker: {error_message(e)}") from None
    except RayActorError:
        raise WorkerEnded("its process was killed, or its node is gone") from None
    except ObjectLostError as e:
        raise SentLostError(type(e).__name__) from None
    except _FULL as e:
        raise StoreFullError(_gist(e)) from None
    except RayError as e:
        raise RuntimeError(f"a rollout worker: {error_message(e)}") from None


def _gist(e: Exception) -> str:
    return (str(e).splitlines() or [type(e).__name__])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartActor:
    """Starts the worker of a slot. slots: where each is; urls: its servers."""

    nodes: RunNodes
    slots: Sequence[Slot]
    urls: Sequence[Sequence[str]]
    factory: SamplingFactory
    logs: Path

    async def __call__(self, slot: int, number: int) -> ActorLink:
        """Raises RuntimeError where it does not start."""
        log = self.logs.resolve() / f"rollout_worker{slot}.log"
        actor = await asyncio.to_thread(self.nodes.start, _Worker, self.slots[slot], log)
        try:
            await actor.start.remote(number, self.factory, self.urls[slot])
        except RayError as e:
            raise RuntimeError(f"rollout worker {slot} did not start: {error_message(e)}; see {log}") from None
        return ActorLink(actor)
