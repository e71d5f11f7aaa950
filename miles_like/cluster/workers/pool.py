"""The rollout workers of a run, for the process that decides: it gives them prompts and gets records.

A group is sampled by one worker, the one with the fewest tokens in flight for each of its servers. Where a worker ends,
the groups that it sampled or held are lost: they are discarded under LOST, their prompts are sampled again, and another
worker takes its place.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from miles_like.batch.parcel import refuse_parcels
from miles_like.checkpoint.run_state import GROUPS_FOLDER
from miles_like.cluster.workers.holder import keys_of
from miles_like.cluster.workers.link import Answered, Link, StoreFullError, WorkerEnded
from miles_like.cluster.workers.rounds import ScoredRound
from miles_like.cluster.workers.worker import Next, Restored
from miles_like.loop.buffer import LOST
from miles_like.records import ColumnsLostError, RecordGroup, SampleRecord
from miles_like.report.reward_calls import RewardTally
from miles_like.types import Prompt, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error

# between tries of an exchange that has no room in an object store, from which Ray removes what is freed after a second
_ROOM_S = (0.5, 2.0, 8.0)


@dataclass(slots=True)
class _Worker:
    link: Link
    number: int
    urls: Sequence[str]
    load: int = 0  # bound on the tokens of its prompts in flight
    held: dict[int, int] = field(default_factory=dict)  # key of a group -> bytes
    outside: set[int] = field(default_factory=set)  # keys of the groups that the node's store has no room for
    ended: bool = False


class StartWorker(Protocol):
    """Starts workers. urls: the servers of each slot."""

    @property
    def urls(self) -> Sequence[Sequence[str]]: ...
    def store(self, slot: int) -> int:
        """The number of the object store that the worker of a slot puts values into; several may share one."""

    async def __call__(self, slot: int, number: int) -> Link:
        """A worker of that number, which is ready. Raises RuntimeError where it does not start."""


@dataclass(kw_only=True)
class RolloutWorkers:
    """The workers of a run: its GroupSampler.

    tokens: bound on the tokens of a prompt's samples. bound: bytes of held values from which no further prompts are
    admitted. restarts: of workers in all. lost: called with the number of a worker that has ended.
    """

    start: StartWorker
    tokens: Callable[[Prompt], int]
    say: Callable[[str], None]
    bound: int
    restarts: int = 3
    lost: Callable[[int], Awaitable[None]] | None = None
    _workers: list[_Worker] = field(default_factory=list)  # by slot
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _calls: itertools.count[int] = field(default_factory=itertools.count)
    _homes: dict[str, int] = field(default_factory=dict)  # prompt id -> slot that has unfinished samples of it
    _writing: asyncio.Task[None] | None = None
    _sent: asyncio.Task[None] | None = None  # the last call about servers
    _restarting: set[asyncio.Task[None]] = field(default_factory=set)
    _served: list[str] | None = None  # URLs of the servers that get requests; None: all
    _rewards: RewardTally = field(default_factory=RewardTally)  # of all workers
    _suspensions: int = 0  # contexts of `suspended` that are entered now

    async def begin(self) -> None:
        """Starts all workers; from now until `close` this process cannot open what they hold. Raises RuntimeError where
        one does not start."""
        refuse_parcels("the driver")
        slots = range(len(self.start.urls))
        numbers = [next(self._numbers) for _ in slots]
        links = await all_or_first_error(self.start(slot, number) for slot, number in zip(slots, numbers, strict=True))
        self._workers = [
            _Worker(link, n, self.start.urls[s]) for s, (link, n) in enumerate(zip(links, numbers, strict=True))
        ]

    # ---- sampling

    async def groups(
        self, round_index: int, prompts: Sequence[Prompt]
    ) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        """Yields (index of the prompt, its group of records) when the group is complete; without samples and refused
        with LOST where its worker ended before. Raises what sampling has raised."""
        shares: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            shares.setdefault(await self._assign(prompt), []).append(i)
        found: asyncio.Queue[tuple[int, SampleGroup] | BaseException] = asyncio.Queue()
        scored = ScoredRound(prompts, len(shares))
        tasks = [
            asyncio.create_task(self._share(self._workers[slot], round_index, prompts, places, found, scored))
            for slot, places in shares.items()
        ]
        try:
            for _ in prompts:
                one = await found.get()
                if isinstance(one, BaseException):
                    raise one
                yield one
        finally:
            scored.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            rest = [found.get_nowait() for _ in range(found.qsize())]
            self.release([one[1] for one in rest if isinstance(one, tuple)])

    async def _share(
        self,
        worker: _Worker,
        round_index: int,
        prompts: Sequence[Prompt],
        places: Sequence[int],
        found: asyncio.Queue[tuple[int, SampleGroup] | BaseException],
        scored: ScoredRound,
    ) -> None:
        call, left, asked = next(self._calls), set(range(len(places))), False
        try:
            await worker.link.call("begin", call, round_index, [prompts[i] for i in places])
            while left:
                now: Next = await worker.link.call("next", call)
                self._rewards.add(now.rewards)
                if now.asks:
                    asked = True
                    await scored.asks(worker, call)
                for done in now.done:
                    left.remove(done.place)
                    worker.held |= {s.key: done.nbytes for s in done.samples[:1]}
                    if done.outside:
                        self._outside(worker, [s.key for s in done.samples[:1]])
                    prompt = prompts[places[done.place]]
                    worker.load -= self.tokens(prompt)
                    group = RecordGroup(
                        prompt=prompt, samples=done.samples, discarded=done.discarded, refused=done.refused
                    )
                    found.put_nowait((places[done.place], group))
        except WorkerEnded as e:
            self._ended(worker, str(e))
            for i in sorted(left):
                found.put_nowait((places[i], RecordGroup(prompt=prompts[places[i]], samples=(), refused=LOST)))
        except Exception as e:
            found.put_nowait(e)
        finally:
            if not asked:
                scored.ends()
            worker.load -= sum(self.tokens(prompts[places[i]]) for i in left)
            if not worker.ended:
                worker.link.send("end", call)

    async def _assign(self, prompt: Prompt) -> int:
        """The slot that samples a prompt: where unfinished samples of it are, else that of the least load."""
        while not (there := [slot for slot, w in enumerate(self._workers) if not w.ended]):
            if not self._restarting:
                raise RuntimeError(
                    f"no rollout worker is left: {len(self._workers)} have ended, and {self.restarts} of them were "
                    "restarted at most; see logs/ in the run directory, then run again with --resume"
                )
            await asyncio.wait(self._restarting, return_when=asyncio.FIRST_COMPLETED)
        home = self._homes.pop(prompt.id, None)
        if home not in there:
            home = min(there, key=lambda slot: self._workers[slot].load / len(self._workers[slot].urls))
        self._workers[home].load += self.tokens(prompt)
        return home

    async def answer(
        self, reward: str | None, prompts: Sequence[Prompt], *, n: int, params: SamplingParams
    ) -> list[SampleGroup]:
        """As `Answer`, by all workers; prompts of a worker that ends are given to the others."""
        shares: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            shares.setdefault(await self._assign(prompt), []).append(i)
        out: dict[int, SampleGroup] = {}

        async def ask(worker: _Worker, places: Sequence[int]) -> None:
            own = [prompts[i] for i in places]
            try:
                found = await worker.link.call("answer", reward, own, n, params)
                for i, (samples, discarded) in zip(places, found, strict=True):
                    out[i] = RecordGroup(prompt=prompts[i], samples=samples, discarded=discarded)
            except WorkerEnded as e:
                self._ended(worker, str(e))
                again = await self.answer(reward, own, n=n, params=params)
                out.update(zip(places, again, strict=True))
            finally:
                worker.load -= sum(map(self.tokens, own))

        await all_or_first_error(ask(self._workers[slot], places) for slot, places in shares.items())
        return [out[i] for i in range(len(prompts))]

    async def abort(self) -> None:
        await self._all("abort")

    @property
    def full(self) -> bool:
        """Whether the values held reach the bound, or an object store has no room for them."""
        return self.nbytes >= self.bound or any(w.outside for w in self._workers if not w.ended)

    @property
    def nbytes(self) -> int:
        """Held by all workers."""
        return sum(sum(w.held.values()) for w in self._workers if not w.ended)

    def metrics(self) -> Mapping[str, float]:
        return {"perf/held_bytes": float(self.nbytes), **self._rewards.metrics()}

    # ---- a worker ends

    def _ended(self, worker: _Worker, why: str) -> None:
        """Marks a worker as ended, and begins to start another in its slot."""
        if worker.ended:
            return
        worker.ended = True
        slot = self._workers.index(worker)
        self.say(f"Rollout worker {slot} has ended ({why}): its samples are discarded and sampled again")
        task = asyncio.create_task(self._restarted(slot, worker))
        self._restarting.add(task)
        task.add_done_callback(self._restarting.discard)

    async def _restarted(self, slot: int, worker: _Worker) -> None:
        if self.lost is not None:
            await self.lost(worker.number)
        if not self.restarts:
            return
        self.restarts -= 1
        number = next(self._numbers)
        try:
            link = await self.start(slot, number)
            if self._served is not None:
                await link.call("serve", self._served)
            for _ in range(self._suspensions):
                await link.call("suspend")
        except RuntimeError as e:
            self.say(f"Rollout worker {slot} was not started again, and others take its prompts: {e}")
            return
        self._workers[slot] = _Worker(link, number, self.start.urls[slot])

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """The answers of all workers; those that have ended give none."""

        async def ask(worker: _Worker) -> list[Any]:
            try:
                return [await worker.link.call(method, *arguments)]
            except WorkerEnded as e:
                self._ended(worker, str(e))
                return []

        answers = await all_or_first_error(ask(w) for w in list(self._workers) if not w.ended)
        return [x for answer in answers for x in answer]

    def _of(self, number: int) -> _Worker | None:
        """The worker of that number; None: it has ended."""
        return next((w for w in self._workers if w.number == number and not w.ended), None)

    # ---- values of tokens

    async def exchange(
        self,
        holder: int,
        keys: Collection[int],
        method: str,
        *arguments: Any,
        sent: Sequence[Any] = (),
        count: int = 0,
    ) -> tuple[Any, Sequence[Any]]:
        """The answer of the worker that holds the groups `keys`, and references as of `Link.exchange`. What it holds is
        counted. Raises ColumnsLostError where it has ended."""
        lost = ColumnsLostError(
            f"rollout worker {holder} has ended, which held {len(set(keys))} groups", [(holder, key) for key in keys]
        )
        if (worker := self._of(holder)) is None:
            raise lost
        try:
            own = sorted(set(keys))
            (answer, held), given = await self._with_room(worker, method, *arguments, keys=own, sent=sent, count=count)
        except WorkerEnded as e:
            self._ended(worker, str(e))
            raise lost from None
        worker.held |= {key: nbytes for key, nbytes in held.items() if key in worker.held}  # else it was released since
        return answer, given

    async def _with_room(
        self, worker: _Worker, method: str, *arguments: Any, **more: Any
    ) -> tuple[Answered, Sequence[Any]]:
        """As `Link.exchange`. Where what the worker gives has no room in the object store, the groups that it and the
        other workers of that store hold make some. Raises RuntimeError where that is not enough."""
        slot = self._workers.index(worker)
        for wait_s in _ROOM_S:
            with suppress(StoreFullError):
                return await worker.link.exchange(method, *arguments, **more)
            await self._make_room(self.start.store(slot))
            await asyncio.sleep(wait_s)
        try:
            return await worker.link.exchange(method, *arguments, **more)
        except StoreFullError as e:
            raise RuntimeError(
                f"the object store on the node of rollout worker {slot} has no room for the values of a step ({e}): "
                "raise Ray's object_store_memory there, free space on the disk to which Ray spills, or lower "
                "train.groups_per_step; --resume continues from the latest checkpoint"
            ) from None

    async def _make_room(self, store: int) -> None:
        async def ask(worker: _Worker) -> None:
            try:
                self._outside(worker, await worker.link.call("make_room"))
            except WorkerEnded as e:
                self._ended(worker, str(e))

        there = [w for slot, w in enumerate(self._workers) if not w.ended and self.start.store(slot) == store]
        await all_or_first_error(map(ask, there))

    def _outside(self, worker: _Worker, keys: Collection[int]) -> None:
        known = worker.held.keys() & set(keys)  # others are not given to this process yet
        if known and not any(w.outside for w in self._workers):
            self.say(
                f"The object store on the node of rollout worker {self._workers.index(worker)} is full: its samples "
                "stay in the worker's own memory, and no further prompts are admitted before a step is trained"
            )
        worker.outside |= known

    def holds(self, holder: int, nbytes: Mapping[int, int]) -> None:
        """Counts further groups that a worker holds: key -> bytes."""
        if (worker := self._of(holder)) is not None:
            worker.held |= nbytes

    def release(self, groups: Collection[SampleGroup]) -> None:
        """Frees the values of groups that are trained or discarded, once their rollouts are written."""
        keys = keys_of(groups)
        if self._writing is None or self._writing.done():
            self._free(keys)
        else:
            self._writing.add_done_callback(lambda _: self._free(keys))

    def _free(self, keys: Mapping[int, Sequence[int]]) -> None:
        for number, own in keys.items():
            if (worker := self._of(number)) is not None:
                worker.link.send("free", own)
                for key in own:
                    worker.held.pop(key, None)
                    worker.outside.discard(key)

    def write_rollouts(
        self, path: Path, groups: Sequence[SampleGroup], columns: Sequence[Sequence[Mapping[str, Any]]] = ()
    ) -> None:
        """As `report.metrics.write_rollouts`, by the workers. `wrote` waits for it."""
        self._writing = asyncio.create_task(self._write(path, groups, columns, self._writing))

    async def wrote(self) -> None:
        """Waits until the rollouts are written, and raises what went wrong."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            await writing

    async def _write(
        self,
        path: Path,
        groups: Sequence[SampleGroup],
        columns: Sequence[Sequence[Mapping[str, Any]]],
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await before
        own: dict[int, list[tuple[SampleGroup, Sequence[Mapping[str, Any]]]]] = {}
        for of in _firsts(groups):
            own.setdefault(of.holder, [])
        for group, more in zip(groups, columns or [[{}] * len(g.samples) for g in groups], strict=True):
            for of in _firsts([group]):
                own[of.holder].append((group, more))
        files = {n: path if len(own) == 1 else path.with_name(f".{path.name}.{n}") for n in own}
        found = await all_or_first_error(
            self._tried(n, "write_rollouts", files[n], *map(list, zip(*mine, strict=True))) for n, mine in own.items()
        )
        written = [n for n, done in zip(own, found, strict=True) if done]
        if len(own) > 1 and written:
            lines = [(written.index(of.holder), n) for of, n in _counted(groups) if of.holder in written]
            await self._tried(written[0], "join_rollouts", path, [files[n] for n in written], lines)

    async def _tried(self, number: int, method: str, *arguments: Any) -> bool:
        """Whether the worker of that number has done it: False for one that has ended."""
        if (worker := self._of(number)) is None:
            return False
        try:
            await worker.link.call(method, *arguments)
        except WorkerEnded as e:
            self._ended(worker, str(e))
            return False
        return True

    async def held(self) -> Mapping[int, Sequence[int]]:
        """Number of each worker -> keys of the groups that it holds; without workers that end meanwhile."""
        out = dict[int, Sequence[int]]()
        for worker in [w for w in self._workers if not w.ended]:
            with suppress(WorkerEnded):
                out[worker.number] = await worker.link.call("held")
        return out

    # ---- checkpoints

    @asynccontextmanager
    async def suspended(self) -> AsyncIterator[None]:
        """As `PartialRollouts.suspended`, of all workers, and of those that take the place of others meanwhile."""
        self._suspensions += 1
        try:
            await self._all("suspend")
            yield
        finally:
            self._suspensions -= 1
            await self._all("resume")

    async def boundary(self, complete: Mapping[str, SampleGroup]) -> None:
        """Lets each worker remember its groups at the boundary of two steps; `complete`: by their keys in a
        checkpoint."""
        await self.wrote()
        own: dict[int, dict[str, SampleGroup]] = {w.number: {} for w in self._workers if not w.ended}
        for name, group in complete.items():
            for s in _firsts([group]):
                if s.holder in own:
                    own[s.holder][name] = group
        await all_or_first_error(self._tried(number, "boundary", groups) for number, groups in own.items())

    async def write(self, folder: Path) -> dict[str, str]:
        """Writes the groups of the last boundary into a checkpoint's folder: file -> SHA-256. Groups of a worker that
        has ended since are left out, and sampled again after a resume."""
        names = {w.number: f"{GROUPS_FOLDER}/{slot}.safetensors" for slot, w in enumerate(self._workers)}
        there = [w for w in self._workers if not w.ended]
        sums = await all_or_first_error(self._sum_of(w, folder.resolve() / names[w.number]) for w in there)
        return {names[w.number]: s for w, s in zip(there, sums, strict=True) if s is not None}

    async def _sum_of(self, worker: _Worker, path: Path) -> str | None:
        try:
            found: str = await worker.link.call("write", path)
        except WorkerEnded as e:
            self._ended(worker, str(e))
            return None
        return found

    async def take_over(self, files: Mapping[Path, str | None]) -> Mapping[str, SampleGroup]:
        """Lets the workers take over the groups of a checkpoint's files (path -> SHA-256): key -> records of a complete
        group. Raises ValueError for a file that was changed."""
        out: dict[str, SampleGroup] = {}
        for i, (path, sha256) in enumerate(files.items()):
            slot = i % len(self._workers)
            restored: Restored = await self._workers[slot].link.call("restore", path, sha256)
            out |= restored.groups
            self._workers[slot].held |= restored.nbytes
            self._homes |= {name.partition("/")[2]: slot for name in restored.unfinished}
        return out

    # ---- servers

    def serve(self, urls: Collection[str]) -> None:
        """From now on these servers get requests, and no others."""
        self._served = list(urls)
        self._send("serve", self._served)

    def _send(self, method: str, *arguments: Any) -> None:
        """After the calls that were sent before, which an actor may begin in another order."""
        before = self._sent

        async def ordered() -> None:
            if before is not None:
                await before
            await self._all(method, *arguments)

        self._sent = asyncio.create_task(ordered())

    async def close(self) -> None:
        for task in self._restarting:
            task.cancel()
        await self.wrote()
        await self._all("close")
        for worker in self._workers:
            worker.link.end()
        refuse_parcels(None)


def _firsts(groups: Collection[SampleGroup]) -> list[SampleRecord]:
    """A record of each group, all of whose samples one worker holds."""
    return [s for g in groups for s in g.samples[:1] if isinstance(s, SampleRecord)]


def _counted(groups: Collection[SampleGroup]) -> list[tuple[SampleRecord, int]]:
    """A record of each group, and the number of its samples."""
    return [(s, len(g.samples)) for g in groups for s in _firsts([g])]
