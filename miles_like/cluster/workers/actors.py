"""Rollout workers as Ray actors. The values that they hold are in Ray's object store, of which they own their part."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
from miles_like.nodes.stacks import write_report
from miles_like.nodes.waits import error_message, ignore_exception, timed_out, write_stacks
from miles_like.nodes.work import DEFAULT_TIMEOUT_S
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
        """`count` parcels; then the answer, or the error. Ray stores them in this order, and its own error in place of
        one that has no room and of those after it: an answer means that all parcels are there."""
        answer: Answered | Exception
        values: Sequence[Any]
        try:
            answer, values = await self._worker.exchange(method, keys, [parcel.value for parcel in sent], *arguments)
        except (ColumnsLostError, RuntimeError, ValueError) as e:
            answer, values = e, [None] * count
        return (*map(Parcel, values), answer) if count else answer


class Pulse:
    """Asks the actor of a worker for a sign of life as long as calls wait for it.

    One that gives none for `limit_s` seconds is ended, after its stacks are kept: what it may still answer is not
    waited for. Time in which this process was suspended does not count.
    """

    def __init__(self, actor: Any, limit_s: float, kept_stacks: Callable[[], str], every_s: float = 15.0) -> None:
        """kept_stacks: keeps the stacks of the worker's process; words that say where. Blocks."""
        self._actor, self._limit_s, self._kept_stacks = actor, limit_s, kept_stacks
        self._every_s = min(every_s, limit_s / 4)
        self._calls = 0
        self._watching: asyncio.Task[None] | None = None
        self._silent: asyncio.Future[str] | None = None

    async def answer(self, reference: Any) -> Any:
        """As `_answer`. Raises WorkerEnded, also where the worker gives no sign of life."""
        if self._silent is None:
            self._silent = asyncio.get_running_loop().create_future()
        call: asyncio.Future[Any] = asyncio.ensure_future(_answer(reference))
        call.add_done_callback(ignore_exception)
        self._calls += 1
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch(self._silent))
        try:
            await asyncio.wait([call, self._silent], return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise WorkerEnded(self._silent.result())
            return call.result()
        finally:
            self._calls -= 1
            call.cancel()

    async def _watch(self, silent: asyncio.Future[str]) -> None:
        while self._calls and not silent.done():
            await asyncio.sleep(self._every_s)
            sign = asyncio.ensure_future(_answer(self._actor.pid.remote()))
            sign.add_done_callback(ignore_exception)
            if await timed_out([sign], self._limit_s):
                where = await asyncio.to_thread(self._kept_stacks)
                ray.kill(self._actor)
                silent.set_result(f"it gave no sign of life for {self._limit_s:g} s{where}")
            elif sign.exception() is not None:
                return  # it has ended, and so have its calls


@dataclass(frozen=True, slots=True)
class ActorLink:
    """A Link to the actor of a worker."""

    actor: Any
    pulse: Pulse

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self.pulse.answer(self.actor.call.remote(method, arguments))

    def send(self, method: str, *arguments: Any) -> None:
        self.actor.call.remote(method, arguments)

    async def exchange(
        self, method: str, *arguments: Any, keys: Sequence[int] = (), sent: Sequence[Any] = (), count: int = 0
    ) -> tuple[Answered, Sequence[Any]]:
        ask = self.actor.exchange.options(num_returns=1 + count)
        found = ask.remote(method, arguments, keys, count, *sent)
        *parcels, status = found if count else [found]
        answer: Answered | Exception = await self.pulse.answer(status)
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
    """Starts the worker of a slot. slots: where each is; urls: its servers. start_s: time limit of a start; silent_s:
    as `limit_s` of `Pulse`."""

    nodes: RunNodes
    slots: Sequence[Slot]
    urls: Sequence[Sequence[str]]
    factory: SamplingFactory
    logs: Path
    start_s: float = DEFAULT_TIMEOUT_S
    silent_s: float = 600.0

    def store(self, slot: int) -> int:
        """Ray's, of its node."""
        return self.slots[slot].node

    async def __call__(self, slot: int, number: int) -> ActorLink:
        """Raises RuntimeError where it does not start."""
        log = self.logs.resolve() / f"rollout_worker{slot}.log"
        actor = await asyncio.to_thread(self.nodes.start, _Worker, self.slots[slot], log)
        started = asyncio.ensure_future(_answer(actor.pid.remote()))
        building = asyncio.ensure_future(_answer(actor.start.remote(number, self.factory, self.urls[slot])))
        try:
            if await timed_out([started, building], self.start_s):
                ray.kill(actor)
                raise RuntimeError(f"it did not answer within {self.start_s:g} s (cluster.timeout_s)")
            pid, _ = await asyncio.gather(started, building)  # the error of the one that failed
        except RuntimeError as e:
            raise RuntimeError(f"rollout worker {slot} did not start: {e}; see {log}") from None
        finally:
            for call in (started, building):
                call.add_done_callback(ignore_exception)
                call.cancel()
        node = self.nodes.of(self.slots[slot]).id
        return ActorLink(actor, Pulse(actor, self.silent_s, partial(_kept_stacks, slot, node, pid, log)))


def _kept_stacks(slot: int, node: str, pid: int, log: Path) -> str:
    """Keeps the stacks of a worker's process in the run directory. Words that say where, after a comma."""
    found = write_stacks([node], [pid], [log])
    named = {f"rollout worker {slot}": stacks for stacks in found.values()}
    head = f"rollout worker {slot} gave no sign of life"
    path = write_report(log.parent.parent / "stacks", f"rollout_worker{slot}", head, named)
    return "" if not found or path is None else f", its stacks are in {path}"
