"""The users of the two sides in a run that takes turns, each of which enters its side for every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from miles_like.loop.buffer import Taken
from miles_like.loop.evaluation import Answering
from miles_like.loop.feed import Feed
from miles_like.protocols import TrainerRanks, WeightPublisher
from miles_like.records import AnyBatch, PlannedBatch
from miles_like.turns.order import Turns
from miles_like.types import Prompt, PublishReport, SampleGroup, SamplingParams, Scored, StepReport, TrainBatch
from rollout.concurrency import all_or_first_error
from rollout.sglang.client import SGLangClient
from rollout.wire.bodies import MemoryTag
from rollout.wire.control import ChecksumReply
from rollout.wire.generate import GenerateRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnServers:
    """The servers of a run, one client each."""

    clients: Sequence[SGLangClient]

    async def release(self, tags: Sequence[MemoryTag]) -> None:
        """Aborts what a cancelled request may have left on the servers, waits until they are idle, and frees the memory
        of `tags`."""
        await all_or_first_error(client.abort_all() for client in self.clients)
        await all_or_first_error(client.release_memory(tags) for client in self.clients)

    async def resume(self, tags: Sequence[MemoryTag]) -> None:
        await all_or_first_error(client.resume_memory(tags) for client in self.clients)

    def published(self) -> None:
        for client in self.clients:
            client.occupation.published()


class InFlight(Protocol):
    """The samples in flight: of PartialRollouts, or of the rollout workers."""

    def suspended(self) -> AbstractAsyncContextManager[None]:
        """Inside the context no request is on a server."""


@dataclass(slots=True, kw_only=True)
class Sampling:
    """The background sampling of a run: its samples in flight keep their tokens while the trainer has the turn."""

    partial: InFlight
    feed: Feed | None = None  # None: nothing is sampled yet
    _closed: AsyncExitStack | None = field(default=None, init=False)

    async def close(self) -> None:
        """Where groups are sampled step by step, waits until those of the step have ended, as a publication does;
        otherwise aborts what is in flight. It continues after `open`."""
        if self._closed is not None:
            return
        if self.feed is not None:
            await self.feed.drain()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.partial.suspended())
            self._closed = stack.pop_all()

    async def open(self) -> None:
        if (closed := self._closed) is not None:
            self._closed = None
            await closed.aclose()


@dataclass(slots=True, kw_only=True)
class TurnFeed(Feed):
    """A Feed whose step gives the servers the turn before it waits for samples, because nothing else would."""

    turns: Turns

    async def take(self, step: int) -> list[Taken] | None:
        if self.stop.asked:
            return None
        async with self.turns.serving():
            return await Feed.take(self, step)


@dataclass(frozen=True, slots=True)
class TurnAnswers:
    """Rollout workers that answer held-out prompts in the servers' turn."""

    workers: Answering
    turns: Turns

    async def answer(
        self, reward: str | None, prompts: Sequence[Prompt], *, n: int, params: SamplingParams
    ) -> Sequence[SampleGroup]:
        async with self.turns.serving():
            return await self.workers.answer(reward, prompts, n=n, params=params)


class TurnClient(SGLangClient):
    """A client that, before each request that needs the servers' memory, gives the servers the turn or waits for it."""

    def __init__(self, url: str, *, turns: Turns, **options: Any) -> None:
        super().__init__(url, **options)
        self._turns = turns

    async def _generated(self, request: GenerateRequest, *, more: int = 0) -> Any:
        async with self._turns.serving():
            return await super()._generated(request, more=more)

    async def flush_cache(self) -> None:
        async with self._turns.serving():
            await super().flush_cache()

    async def checksum(self) -> ChecksumReply:
        async with self._turns.serving():
            return await super().checksum()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTrainer:
    """Trainer ranks, awake for each call. trains_policy: whether the servers serve their weights."""

    ranks: TrainerRanks
    turns: Turns
    trains_policy: bool = True

    @property
    def dp_size(self) -> int:
        return self.ranks.dp_size

    def connect(self, factory: Callable[[int, int], WeightPublisher]) -> None:
        self.ranks.connect(factory)

    def fingerprint(self) -> str | None:
        return self.ranks.fingerprint()

    async def train(self, batches: Sequence[AnyBatch]) -> StepReport:
        async with self.turns.training(changes=self.trains_policy):
            return await self.ranks.train(batches)

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, float]:
        async with self.turns.training():
            return await self.ranks.evaluate(batch)

    async def score(
        self, batch: TrainBatch, *, temperature: float, replay: bool, states: bool = False
    ) -> list[tuple[int, Scored]]:
        async with self.turns.training():
            return await self.ranks.score(batch, temperature=temperature, replay=replay, states=states)

    async def logprobs(
        self, batch: TrainBatch, *, weights: str | None = None, candidates: bool = False
    ) -> Sequence[Sequence[Tensor]]:
        async with self.turns.training():
            return await self.ranks.logprobs(batch, weights=weights, candidates=candidates)

    async def held_logprobs(
        self, batch: PlannedBatch, *, weights: str | None = None, replay: bool = False
    ) -> Mapping[int, Sequence[Any]]:
        async with self.turns.training():
            return await self.ranks.held_logprobs(batch, weights=weights, replay=replay)

    async def load_copy(self, name: str, path: Path) -> None:
        async with self.turns.training():
            await self.ranks.load_copy(name, path)

    async def publish(self, *, version: int) -> PublishReport:
        """The servers have the turn afterwards."""
        return await self.turns.publish(version=version)

    async def save(self, path: Path, *, asynchronous: bool = False) -> None:
        async with self.turns.training():
            await self.ranks.save(path, asynchronous=asynchronous)

    async def finish_save(self, *, wait: bool) -> bool:
        """In either turn: the state is in host memory by then."""
        return await self.ranks.finish_save(wait=wait)

    async def load(self, path: Path, *, version: int | None = None) -> None:
        async with self.turns.training(changes=self.trains_policy):
            await self.ranks.load(path, version=version)

    async def close(self) -> None:
        await self.ranks.close()
