"""A rollout worker: samples and scores groups with clients of some servers, and keeps the values of their tokens.

The process that decides gets records. Calls of `begin`, `next` and `end` belong to one share of a round's prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from miles_like.batch.portion import Portion
from miles_like.checkpoint.saved_groups import read_groups, write_groups
from miles_like.cluster.workers.holder import ColumnHolder, Objects, Wanted
from miles_like.report.metrics import write_rollouts
from miles_like.storage.completion import file_sha256
from miles_like.types import PlannedMicroBatch, Prompt, RecordGroup, SampleGroup, SampleRecord, SamplingParams
from routing_replay.align import ShardSpec


class Sampler(Protocol):
    """Samples and scores the prompts of a round (run.setup.sampler.EngineSampler)."""

    def groups(self, round_index: int, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, SampleGroup], None]: ...
    async def abort(self) -> None: ...


class Unfinished(Protocol):
    """The samples of groups that are not complete (rollout.episodes.partial.PartialRollouts)."""

    def suspended(self) -> AbstractAsyncContextManager[None]: ...
    def state(self) -> Mapping[str, SampleGroup]: ...
    def restore(self, state: Mapping[str, SampleGroup]) -> None: ...


class Answer(Protocol):
    """Samples and scores held-out prompts."""

    async def __call__(
        self, reward: str | None, prompts: Sequence[Prompt], *, n: int, params: SamplingParams
    ) -> Sequence[SampleGroup]:
        """`n` samples of each prompt, in their order. reward: name of that of the set; None: the run's."""


class Engines(Protocol):
    """The servers of a worker (rollout.episodes.pool.EnginePool)."""

    def expect(self) -> None: ...
    def leave_out(self, urls: Collection[str]) -> None: ...
    def restore(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a worker samples with. filter: why a scored group is discarded; None: it is worth training."""

    sampler: Sampler
    partial: Unfinished
    engines: Engines
    filter: Callable[[SampleGroup], str | None]
    answer: Answer
    close: Callable[[], Any]  # a coroutine function


SamplingFactory = Callable[[Sequence[str]], Sampling]  # of the URLs of a worker's servers
UNFINISHED = "partial/"  # prefix of the keys of unfinished groups in a checkpoint's file


class Done(NamedTuple):
    """A group that is complete, without its prompt, which the caller has."""

    place: int  # of the prompt in the share
    samples: tuple[SampleRecord, ...]
    discarded: Mapping[str, int]
    refused: str | None
    nbytes: int  # held of it


class Restored(NamedTuple):
    """What a worker has taken over from a checkpoint's file."""

    groups: Mapping[str, RecordGroup]  # complete ones, by their keys
    unfinished: Sequence[str]  # "sampling seed/prompt id"
    nbytes: Mapping[int, int]  # key of each complete group in the worker -> bytes held of it


@dataclass(slots=True)
class _Share:
    """The prompts of one round that this worker samples."""

    task: asyncio.Task[None]
    done: list[Done] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class RolloutWorker:
    """One rollout worker, independent of the transport of the calls."""

    def start(self, number: int, factory: SamplingFactory, urls: Sequence[str], objects: Objects) -> None:
        """number: of no other worker of the run, also of none that has ended."""
        self._sampling = factory(urls)
        self.holder = ColumnHolder(number, objects)
        self._shares: dict[int, _Share] = {}
        self._suspended: AsyncExitStack | None = None
        # at the last boundary: references of the complete groups with their records, and unfinished groups
        self._complete: dict[str, tuple[int, Any, Sequence[SampleRecord]]] = {}
        self._unfinished: Mapping[str, SampleGroup] = {}

    # ---- sampling

    async def begin(self, call: int, round_index: int, prompts: Sequence[Prompt]) -> None:
        """Begins to sample a share of a round; `call`: its number."""
        self._shares[call] = share = _Share(asyncio.create_task(self._sample(call, round_index, prompts)))
        share.task.add_done_callback(lambda _: share.changed.set())

    async def next(self, call: int) -> Sequence[Done]:
        """Waits for further groups of a share, and returns those that are complete since the last call. Raises what
        sampling has raised."""
        share = self._shares[call]
        await share.changed.wait()
        share.changed.clear()
        if share.task.done():
            share.task.result()
        done, share.done = share.done, []
        return done

    async def end(self, call: int) -> None:
        """Ends a share, whose requests are cancelled."""
        share = self._shares.pop(call, None)
        if share is not None:
            share.task.cancel()
            await asyncio.wait({share.task})
            self.holder.free(s.key for done in share.done for s in done.samples[:1])  # the caller does not get them

    async def _sample(self, call: int, round_index: int, prompts: Sequence[Prompt]) -> None:
        async with contextlib.aclosing(self._sampling.sampler.groups(round_index, prompts)) as groups:
            async for place, group in groups:
                refused = self._sampling.filter(group) if group.samples else None
                share = self._shares[call]
                records = self.holder.keep(group)
                nbytes = self.holder.bytes_of(records[0].key) if records else 0
                share.done.append(Done(place, records, group.discarded, refused, nbytes))
                share.changed.set()

    async def abort(self) -> None:
        await self._sampling.sampler.abort()

    async def answer(
        self, reward: str | None, prompts: Sequence[Prompt], n: int, params: SamplingParams
    ) -> list[tuple[tuple[SampleRecord, ...], Mapping[str, int]]]:
        """As `Answer`: the records of each prompt's samples, which are not held, and why others are discarded."""
        groups = await self._sampling.answer(reward, prompts, n=n, params=params)
        return [(self.holder.records(g), g.discarded) for g in groups]

    async def suspend(self) -> None:
        """Until `resume` no request is on a server, and the state of unfinished groups is complete."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._sampling.partial.suspended())
            self._suspended = stack.pop_all()

    async def resume(self) -> None:
        suspended, self._suspended = self._suspended, None
        if suspended is not None:
            await suspended.aclose()

    # ---- servers

    async def expect(self) -> None:
        self._sampling.engines.expect()

    async def leave_out(self, urls: Collection[str]) -> None:
        self._sampling.engines.leave_out(urls)

    async def restore_engines(self) -> None:
        self._sampling.engines.restore()

    # ---- values

    async def free(self, keys: Sequence[int]) -> None:
        """The groups are trained or discarded."""
        self.holder.free(keys)

    async def portions(
        self,
        cells: Sequence[PlannedMicroBatch],
        wanted: Mapping[str, Wanted],
        parts: Sequence[ShardSpec],
        replayed: bool,
    ) -> list[Portion]:
        """As `ColumnHolder.portions`, in a thread, so that sampling goes on."""
        return await asyncio.to_thread(self.holder.portions, cells, wanted, parts, replayed=replayed)

    async def write_rollouts(self, path: Path, groups: Sequence[RecordGroup], first: bool) -> None:
        """As `report.metrics.write_rollouts`, appended unless `first`."""

        def write() -> None:
            held = [(g, self.holder.group(g.samples[0].key)) for g in groups]
            whole = [replace(_scored(of, g.samples), prompt=g.prompt) for g, of in held]
            write_rollouts(path, whole, append=not first)

        await asyncio.to_thread(write)

    async def held(self) -> Sequence[int]:
        """Keys of the groups that are held, those of the last boundary included."""
        return sorted({*self.holder.keys, *(key for key, _, _ in self._complete.values())})

    # ---- checkpoints

    async def boundary(self, complete: Mapping[str, Sequence[SampleRecord]]) -> None:
        """Remembers the state at the boundary of two steps, until the next: these complete groups, by their keys in a
        checkpoint, and the unfinished ones."""
        references = self.holder.references(records[0].key for records in complete.values())
        self._complete = {
            name: (records[0].key, references[records[0].key], records) for name, records in complete.items()
        }
        self._unfinished = dict(self._sampling.partial.state())

    async def write(self, path: Path) -> str:
        """Writes the state at the last boundary to a file; returns its SHA-256."""
        complete, unfinished = self._complete, self._unfinished

        def write() -> str:
            groups = {
                name: _scored(self.holder.of_reference(key, reference), records)
                for name, (key, reference, records) in complete.items()
            }
            groups |= {UNFINISHED + name: group for name, group in unfinished.items()}
            path.parent.mkdir(parents=True, exist_ok=True)
            write_groups(path, groups)
            return file_sha256(path)

        return await asyncio.to_thread(write)

    async def restore(self, path: Path, sha256: str | None) -> Restored:
        """Takes over the groups of a checkpoint's file. Raises ValueError for a file that was changed."""
        groups = await asyncio.to_thread(_read, path, sha256)
        unfinished = {n.removeprefix(UNFINISHED): g for n, g in groups.items() if n.startswith(UNFINISHED)}
        self._sampling.partial.restore(unfinished)
        complete = {
            name: RecordGroup(prompt=g.prompt, samples=self.holder.keep(g), discarded=g.discarded)
            for name, g in groups.items()
            if not name.startswith(UNFINISHED)
        }
        keys = [g.samples[0].key for g in complete.values() if g.samples]
        return Restored(complete, list(unfinished), {key: self.holder.bytes_of(key) for key in keys})

    async def close(self) -> None:
        for call in list(self._shares):
            await self.end(call)
        await self._sampling.close()


def _scored(group: SampleGroup, records: Sequence[SampleRecord]) -> SampleGroup:
    """The samples with the rewards of their records, which overlong shaping may have reduced."""
    by_index = {r.index: r for r in records}
    samples = [
        replace(s, reward=by_index[s.index].reward, reward_parts=by_index[s.index].reward_parts) for s in group.samples
    ]
    return replace(group, samples=tuple(samples))


def _read(path: Path, sha256: str | None) -> Mapping[str, SampleGroup]:
    if sha256 is not None and file_sha256(path) != sha256:
        raise ValueError(f"{path} was changed after it was written: resume from an earlier checkpoint")
    return read_groups(path)
