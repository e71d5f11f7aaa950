"""A rollout worker: samples and scores groups with clients of some servers, and keeps the values of their tokens.

The process that decides gets records. Calls of `begin`, `next` and `end` belong to one share of a round's prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from miles_like import spans
from miles_like.batch.portion import Portion
from miles_like.checkpoint.saved_groups import read_groups, write_groups
from miles_like.cluster.workers.holder import AskedRow, ColumnHolder, Columns, Objects, added, of_records
from miles_like.cluster.workers.link import Answered
from miles_like.protocols import RewardFn
from miles_like.records import RecordGroup, SampleRecord
from miles_like.report.metrics import write_rollouts
from miles_like.report.reward_calls import RewardTally
from miles_like.storage.completion import file_sha256
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, Score, Unit, Unscored


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


class Work(Protocol):
    """What a run computes from the values of tokens (experience.token_work.TokenWork)."""

    async def __call__(
        self, what: str, groups: Sequence[SampleGroup], *arguments: Any
    ) -> tuple[Sequence[SampleGroup], Sequence[Any]]:
        """The groups with further columns, and numbers of each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What a worker samples with, and computes of samples. filter: why a scored group is discarded; None: it is worth
    training."""

    sampler: Sampler
    partial: Unfinished
    serve: Callable[[Collection[str]], None]  # the servers that get requests from now on
    filter: Callable[[SampleGroup], str | None]
    answer: Answer
    work: Work
    reward: RewardFn | None = None  # of whole rounds, for which the sampler has RewardOfRounds
    close: Callable[[], Any]  # a coroutine function
    rewards: RewardTally = field(default_factory=RewardTally)  # of all rewards that the worker calls


SamplingFactory = Callable[[Sequence[str]], Sampling]  # of the URLs of a worker's servers
UNFINISHED = "partial/"  # prefix of the keys of unfinished groups in a checkpoint's file


class Done(NamedTuple):
    """A group that is complete, without its prompt, which the caller has."""

    place: int  # of the prompt in the share
    samples: tuple[SampleRecord, ...]
    discarded: Mapping[str, int]
    refused: str | None
    nbytes: int  # held of it
    outside: bool  # of the store, which has no room for it


class Next(NamedTuple):
    """What is new in a share."""

    done: Sequence[Done]
    asks: bool  # its samples wait for their scores, until `scored` (rounds.py)
    rewards: RewardTally  # calls of the whole worker since the last news


class Restored(NamedTuple):
    """What a worker has taken over from a checkpoint's file."""

    groups: Mapping[str, RecordGroup]  # complete ones, by their keys
    unfinished: Sequence[str]  # "sampling seed/prompt id"
    nbytes: Mapping[int, int]  # key of each complete group in the worker -> bytes held of it


@dataclass(slots=True)
class _Share:
    """The prompts of one round that this worker samples."""

    task: asyncio.Task[None] = field(init=False)
    done: list[Done] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    unscored: tuple[Sequence[Prompt], Sequence[Sample]] | None = None  # prompt of each sample, and these
    asked: bool = False  # the caller of `next` knows of them
    scores: asyncio.Future[Sequence[Score | Unscored]] | None = None


_SHARE: ContextVar[_Share] = ContextVar("share")  # whose groups this task samples


@dataclass(frozen=True, slots=True)
class RewardOfRounds:
    """In place of a reward of Unit.BATCH: the samples of a share wait until one worker has called the reward with those
    of all workers."""

    reward: RewardFn

    @property
    def unit(self) -> Unit:
        return self.reward.unit

    @property
    def slow(self) -> bool:
        return self.reward.slow

    @property
    def compares(self) -> str | None:
        return self.reward.compares

    async def __call__(self, prompts: Sequence[Prompt], samples: Sequence[Sample]) -> Sequence[Score | Unscored]:
        share = _SHARE.get()
        share.unscored, share.scores = (prompts, samples), asyncio.get_running_loop().create_future()
        share.changed.set()
        return await share.scores

    async def close(self) -> None:
        await self.reward.close()


class RolloutWorker:
    """One rollout worker, independent of the transport of the calls."""

    def start(self, number: int, factory: SamplingFactory, urls: Sequence[str], objects: Objects) -> None:
        """number: of no other worker of the run, also of none that has ended."""
        self._sampling = factory(urls)
        self.holder = ColumnHolder(number, objects)
        self._shares: dict[int, _Share] = {}
        self._suspended: list[AsyncExitStack] = []
        # at the last boundary: references of the complete groups with their records, and unfinished groups
        self._complete: dict[str, tuple[int, Any, RecordGroup]] = {}
        self._unfinished: Mapping[str, SampleGroup] = {}

    # ---- sampling

    async def begin(self, call: int, round_index: int, prompts: Sequence[Prompt]) -> None:
        """Begins to sample a share of a round; `call`: its number."""
        self._shares[call] = share = _Share()
        context = copy_context()
        context.run(_SHARE.set, share)
        share.task = asyncio.create_task(self._sample(call, round_index, prompts), context=context)
        share.task.add_done_callback(lambda _: share.changed.set())

    async def next(self, call: int) -> Next:
        """Waits for news of a share, and returns them. Raises what sampling has raised."""
        share = self._shares[call]
        await share.changed.wait()
        share.changed.clear()
        if share.task.done():
            share.task.result()
        done, share.done = share.done, []
        asks, share.asked = share.unscored is not None and not share.asked, share.unscored is not None
        return Next(done, asks, self._sampling.rewards.take())

    async def unscored(
        self, values: Sequence[Any], call: int
    ) -> tuple[list[str], list[tuple[Sequence[Prompt], Sequence[Sample]]]]:
        """The samples of a share that wait for their scores, without routes, and the ids of their prompts. values:
        none."""
        found = self._shares[call].unscored
        assert found is not None, "a share that asks"
        prompts, samples = found
        return [p.id for p in prompts], [(prompts, [replace(s, routing=None) for s in samples])]

    async def score(
        self, values: Sequence[tuple[Sequence[Prompt], Sequence[Sample]]], order: Sequence[tuple[int, int]]
    ) -> tuple[Sequence[Score | Unscored], list[Any]]:
        """Scores of what several workers lend, in one call. order: (which of `values`, number there) of each sample."""
        assert self._sampling.reward is not None, "of whole rounds"
        prompts, samples = [values[i][0][n] for i, n in order], [values[i][1][n] for i, n in order]
        return await self._sampling.reward(prompts, samples), []

    async def scored(self, call: int, scores: Sequence[Score | Unscored]) -> None:
        """Of the samples that `unscored` gave."""
        share = self._shares.get(call)
        if share is not None and share.scores is not None and not share.scores.done():
            share.scores.set_result(scores)

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
                nbytes = sum(self.holder.bytes_of(s.key for s in records[:1]).values())
                outside = any(s.key in self.holder.outside for s in records[:1])
                share.done.append(Done(place, records, group.discarded, refused, nbytes, outside))
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
        """Until `resume` was called as often no request is on a server, and the state of unfinished groups is
        complete."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._sampling.partial.suspended())
            self._suspended.append(stack.pop_all())

    async def resume(self) -> None:
        if self._suspended:
            await self._suspended.pop().aclose()

    # ---- servers

    async def serve(self, urls: Collection[str]) -> None:
        """From now on these servers get requests, and no others."""
        self._sampling.serve(urls)

    # ---- values

    async def exchange(
        self, method: str, keys: Sequence[int], values: Sequence[Any], *arguments: Any
    ) -> tuple[Answered, Sequence[Any]]:
        """A method that gets values of tokens and gives some: its answer, and what it gives. keys: of the groups that
        are held here which it is about."""
        answer, given = await getattr(self, method)(values, *arguments)
        return Answered(answer, self.holder.bytes_of(keys)), given

    async def make_room(self) -> Sequence[int]:
        """Takes all groups out of the store; returns their keys."""
        there = {key: reference for key, reference, _ in self._complete.values()}
        own = await asyncio.to_thread(self.holder.copies, there | dict(self.holder.references(self.holder.keys)))
        self.holder.take_out(own)
        self._complete = {name: (key, own.get(key, r), of) for name, (key, r, of) in self._complete.items()}
        return list(self.holder.outside)

    async def free(self, keys: Sequence[int]) -> None:
        """The groups are trained or discarded."""
        self.holder.free(keys)

    async def portions(self, values: Sequence[Any], asked: AskedRow) -> tuple[list[int | None], list[Portion]]:
        """The bytes of routes of each portion (None: it has none), and the portions, as `ColumnHolder.portions`; in a
        thread, so that sampling goes on. values: none."""
        found = await asyncio.to_thread(self.holder.portions, asked)
        return [portion.route_bytes for portion in found], found

    async def keep(
        self, values: Sequence[Mapping[str, Tensor]], stream: str, places: Mapping[str, tuple[int, tuple[int, int]]]
    ) -> tuple[None, list[Any]]:
        """Adds a stream to samples. values: name of a sample in a batch -> [S]; places: key and place of each, also of
        those without a value, whose streams are zeros."""
        found = {name: x for one in values for name, x in one.items()}
        missing = {key for name, (key, _) in places.items() if name not in found}
        lengths = {(key, s.place): s.length for key in missing for s in self.holder.group(key).samples}
        for name, (key, place) in places.items():
            x = found[name] if name in found else torch.zeros(lengths[key, place])
            self.holder.add(key, {place: {stream: x}})
        return None, []

    async def compute(
        self, values: Sequence[Any], what: str, groups: Sequence[RecordGroup], *arguments: Any
    ) -> tuple[Sequence[Any], list[Any]]:
        """Numbers of each group, by `Work`, whose further columns are kept. values: none."""
        before = await asyncio.to_thread(self.holder.values, groups)
        after, numbers = await self._sampling.work(what, before, *arguments)
        for records, old, new in zip(groups, before, after, strict=True):
            columns = {a.place: added(b, a) for b, a in zip(old.samples, new.samples, strict=True)}
            self.holder.add(records.samples[0].key, columns)
        return numbers, []

    async def derive(
        self, values: Sequence[Any], what: str, groups: Sequence[RecordGroup], arguments: Sequence[str]
    ) -> tuple[tuple[list[tuple[SampleRecord, ...]], Mapping[int, int]], list[Any]]:
        """Holds groups that `Work` makes from others; their records, and the bytes held of each group. values: none."""
        before = await asyncio.to_thread(self.holder.values, groups)
        made, _ = await self._sampling.work(what, before, arguments)
        records = [self.holder.keep(g) for g in made]
        return (records, self.holder.bytes_of(s.key for of in records for s in of[:1])), []

    async def move(
        self, values: Sequence[Any], stream: str, groups: Sequence[RecordGroup], derived: Sequence[RecordGroup]
    ) -> tuple[None, list[Any]]:
        """Gives samples the stream of derived ones at the tokens after the prompt; 0 where they have no loss. values:
        none."""
        for records, to, of in zip(groups, self.holder.values(groups), self.holder.values(derived), strict=True):
            columns = {}
            for s, other in zip(to.samples, of.samples, strict=True):
                n = s.length - len(records.prompt.token_ids)
                placed = torch.zeros(s.length)
                placed[s.length - n :] = other.streams[stream][other.length - n :] if stream in other.streams else 0.0
                columns[s.place] = {stream: torch.where(s.loss_mask, placed, 0.0)}
            self.holder.add(records.samples[0].key, columns)
        return None, []

    async def lend(self, values: Sequence[Any], groups: Sequence[RecordGroup]) -> tuple[None, list[list[SampleGroup]]]:
        """The groups without routes, for another worker. values: none."""
        found = await asyncio.to_thread(self.holder.values, groups)
        bare = [replace(g, samples=tuple(replace(s, routing=None) for s in g.samples)) for g in found]
        return None, [bare]

    async def gather(
        self, values: Sequence[Sequence[SampleGroup]], what: str, orders: Sequence[Sequence[int]], *arguments: Any
    ) -> tuple[Sequence[Any], list[list[list[Columns]]]]:
        """As `compute`, of groups that several workers lend: the numbers of each group, and for each lender the columns
        of its groups' samples. orders: of each of `values`, the place of each group in the rollout."""
        placed = {i: g for of, order in zip(values, orders, strict=True) for i, g in zip(order, of, strict=True)}
        before = [placed[i] for i in range(len(placed))]
        after, numbers = await self._sampling.work(what, before, *arguments)
        columns = [
            [added(b, a) for b, a in zip(old.samples, new.samples, strict=True)]
            for old, new in zip(before, after, strict=True)
        ]
        return numbers, [[columns[i] for i in order] for order in orders]

    async def add(
        self, values: Sequence[Sequence[Sequence[Columns]]], groups: Sequence[RecordGroup]
    ) -> tuple[None, list[Any]]:
        """Adds columns to the samples of groups. values: one, of each sample of each group."""
        for records, columns in zip(groups, values[0], strict=True):
            named = {s.place: own for s, own in zip(records.samples, columns, strict=True)}
            self.holder.add(records.samples[0].key, named)
        return None, []

    async def write_rollouts(
        self, path: Path, groups: Sequence[RecordGroup], columns: Sequence[Sequence[Mapping[str, Any]]]
    ) -> None:
        """As `report.metrics.write_rollouts`. columns: what the driver has of each sample of each group."""

        def write() -> None:
            write_rollouts(path, self.holder.values(groups), columns)

        await asyncio.to_thread(write)

    async def join_rollouts(self, path: Path, parts: Sequence[Path], lines: Sequence[tuple[int, int]]) -> None:
        """Writes `path` from the files of several workers, which it removes. lines: of each group in its order, the
        number of its file in `parts` and of its lines."""

        def join() -> None:
            with ExitStack() as files:
                opened = [files.enter_context(part.open("rb")) for part in parts]
                out = files.enter_context(path.open("wb"))
                for part, n in lines:
                    out.writelines(islice(opened[part], n))
            for part_file in parts:
                part_file.unlink()

        await asyncio.to_thread(join)

    async def held(self) -> Sequence[int]:
        """Keys of the groups that are held, those of the last boundary included."""
        return sorted({*self.holder.keys, *(key for key, _, _ in self._complete.values())})

    # ---- checkpoints

    async def boundary(self, complete: Mapping[str, RecordGroup]) -> None:
        """Remembers the state at the boundary of two steps, until the next: these complete groups, by their keys in a
        checkpoint, and the unfinished ones."""
        keys = {name: records.samples[0].key for name, records in complete.items()}
        references = self.holder.references(keys.values())
        self._complete = {name: (keys[name], references[keys[name]], of) for name, of in complete.items()}
        self._unfinished = dict(self._sampling.partial.state())

    async def write(self, path: Path) -> str:
        """Writes the state at the last boundary to a file; returns its SHA-256."""
        complete, unfinished = self._complete, self._unfinished

        def write() -> str:
            groups = {
                name: of_records(records, self.holder.of_reference(key, reference))
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
        return Restored(complete, list(unfinished), self.holder.bytes_of(keys))

    async def close(self) -> None:
        for call in list(self._shares):
            await self.end(call)
        await self._sampling.close()
        spans.flush()


def _read(path: Path, sha256: str | None) -> Mapping[str, SampleGroup]:
    if sha256 is not None and file_sha256(path) != sha256:
        raise ValueError(f"{path} was changed after it was written: resume from an earlier checkpoint")
    return read_groups(path)
