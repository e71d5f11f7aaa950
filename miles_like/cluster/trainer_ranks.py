"""Trainer ranks as Ray actors.

Ranks get picklable factories, so that this module imports no concrete trainer or publisher.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ray
from ray.exceptions import RayError
from torch import Tensor

from miles_like.batch.packing import cut_shard
from miles_like.batch.unpacking import summed
from miles_like.cluster.actors import Process
from miles_like.cluster.call_deadlines import CallDeadlines, format_ranks
from miles_like.cluster.lost.processes import LOST, end_processes, first_deaths, why_died
from miles_like.cluster.observed.memory import StoreMemory, largest
from miles_like.cluster.placement import Slot
from miles_like.cluster.rank import Place, PublisherFactory, Rank, TrainerFactory
from miles_like.cluster.run_nodes import RunNodes
from miles_like.nodes.members import cluster_gist
from miles_like.nodes.stacks import root_of, write_report
from miles_like.nodes.waits import error_message, first_cause, ignore_exception, root_cause, timed_out, write_stacks
from miles_like.nodes.work import DEFAULT_TIMEOUT_S
from miles_like.records import AnyBatch, PlannedBatch
from miles_like.types import LostRank, PublishReport, RanksLostError, Scored, StepReport, TrainBatch
from routing_replay.versions import version_of


class _Rank(Process, Rank):
    """One trainer rank."""


class _Shipped(NamedTuple):
    """A batch in the object store."""

    refs: Sequence[tuple[ray.ObjectRef[Any], ...]]  # of each rank: its shard, then the parts of it
    route_bytes: int | None  # of the routes of all places; None: it has none


class Pulled(NamedTuple):
    """The portions of a planned batch in the object store."""

    portions: Mapping[Place, Sequence[ray.ObjectRef[Any]]]  # parcels of `Portion`s, which only ranks open
    route_bytes: int | None  # of all places; None: the samples have no routes


class ColumnSource(Protocol):
    """The holders of the values of samples."""

    async def pull(self, batch: PlannedBatch, places: Sequence[Place]) -> Pulled:
        """What each place needs. Raises ColumnsLostError where a holder has lost samples, before a rank computes."""


class RayTrainer:
    """A `Trainer` whose ranks are Ray actors."""

    columns: ColumnSource | None = None  # of batches of records
    life: int = 0  # of the run's trainer ranks: weights are published as `version_of(step, life)`
    _under_way: str | None = None  # the call that waits for the ranks
    _closed = False
    _store = StoreMemory()

    put = staticmethod(ray.put)  # for arguments that several ranks share

    def __init__(
        self,
        factory: TrainerFactory,
        slots: Sequence[Slot],
        nodes: RunNodes,
        dp_size: int,
        log_dir: Path,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Starts every rank and waits until all have built their model. Raises RuntimeError when one cannot.

        timeout_s: least time limit of a call (`CallDeadlines`). When ranks exceed the limit, every rank's stacks are
        written to its log, RanksLostError names the late ranks, and every further call raises it again. Where the
        process of a rank has ended, a call raises RanksLostError too.
        """
        self.dp_size = dp_size
        self._deadlines = CallDeadlines(timeout_s)
        self._stuck: RanksLostError | None = None
        self._role = slots[0].role
        self._node_ids = [nodes.of(slot).id for slot in slots]
        self._addresses = [nodes.of(slot).address for slot in slots]
        self._logs = [(log_dir / f"{s.role}_rank{s.index}.log").resolve() for s in slots]
        self._pids: list[int] = []
        self._ranks = [nodes.start(_Rank, s, log) for s, log in zip(slots, self._logs, strict=True)]
        world = len(slots)
        try:
            self._pids = self._call_first("pid", [()] * world)
            ((host, port),) = self._call_first("address", [()])
            started = [(factory, i, world, host, port) for i in range(world)]
            self._places: list[Place] = self._call_first("start", started)
        except RuntimeError:
            self.end()
            raise
        self._version = 0

    def connect(self, factory: PublisherFactory) -> None:
        """Create every rank's publisher."""
        self._call_first("connect", [(factory,)] * len(self._ranks))

    def fingerprint(self) -> str | None:
        """A hash of the results of the ranks' kernels; None unless the trainer is deterministic."""
        (fingerprint,) = self._call_first("fingerprint", [()])
        return fingerprint if fingerprint is None else str(fingerprint)

    async def train(self, batches: Sequence[AnyBatch]) -> StepReport:
        """Adds the metric `routing/bytes`: bytes of routes put into the object store for these steps. The agreement is
        of all ranks together."""
        shipped = [
            await self._pull(batch) if isinstance(batch, PlannedBatch) else self._ship(batch) for batch in batches
        ]
        self._version += 1
        loss_tokens = [batch.loss_tokens for batch in batches]
        # references must be top-level arguments: Ray does not fetch nested ones
        arguments = [
            (loss_tokens, self._version, [len(of) - 1 for of in refs], *chain(*refs))
            for refs in zip(*(one.refs for one in shipped), strict=True)
        ]
        reports: list[StepReport] = await self._all("train", arguments)
        more = largest([report.metrics for report in reports]) | await asyncio.to_thread(self._store.metrics)
        routes = [one.route_bytes for one in shipped if one.route_bytes is not None]
        if routes:
            more["routing/bytes"] = float(sum(routes))
        agreement = summed([report.agreement for report in reports])
        return replace(reports[0], metrics={**reports[0].metrics, **more}, agreement=agreement)

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, float]:
        refs = self._ship(batch).refs
        answers = await self._all("evaluate", [(*of, batch.loss_tokens) for of in refs])
        metrics: Mapping[str, float] = answers[0]
        return metrics

    async def score(
        self, batch: TrainBatch, *, temperature: float, replay: bool, states: bool = False
    ) -> list[tuple[int, Scored]]:
        """(its DP shard, its result) of every rank. Forward only."""
        refs = self._ship(batch).refs
        scores = await self._all("score", [(*of, temperature, replay, states) for of in refs])
        return [(shard, scored) for (shard, _), scored in zip(self._places, scores, strict=True)]

    async def logprobs(
        self, batch: TrainBatch, *, weights: str | None = None, candidates: bool = False
    ) -> list[list[Tensor]]:
        """[dp][micro] of [T] fp32, or [T, C] with `candidates`. No routes are sent, because the ranks use their own
        routers. The first rank of each DP shard replies."""
        sent = [self.put([replace(m, routing=None) for m in shard]) for shard in batch.grid]
        shards = [shard for shard, _ in self._places]
        replies = [shards.index(shard) == i for i, shard in enumerate(shards)]
        arguments = [(sent[shard], weights, candidates, reply) for shard, reply in zip(shards, replies, strict=True)]
        answers = await self._all("logprobs", arguments)
        return [answers[shards.index(shard)] for shard in range(len(batch.grid))]

    async def held_logprobs(
        self, batch: PlannedBatch, *, weights: str | None = None, replay: bool = False
    ) -> Mapping[int, Sequence[ray.ObjectRef[Any]]]:
        """As `Trainer.held_logprobs`. The first rank of each DP shard gives the values of each holder's samples."""
        if replay != (batch.only is None) or (replay and weights is not None):
            raise RuntimeError("log-probs are of models that route on their own, planned with `only`, or of the replay")
        shipped = await self._pull(batch)
        shards = [shard for shard, _ in self._places]
        names: list[dict[int, list[str]]] = [{} for _ in batch.grid]
        for own, row in zip(names, batch.grid, strict=True):
            for name in (name for cell in row if not cell.filler for name in cell.samples):
                own.setdefault(batch.records[name].holder, []).append(name)
        asked = [names[shard] if shards.index(shard) == i else {} for i, shard in enumerate(shards)]
        arguments = [
            (shard[0], weights, replay, list(own.values()), *shard[1:])
            for shard, own in zip(shipped.refs, asked, strict=True)
        ]
        given = await self._given("held_logprobs", arguments, [len(own) for own in asked])
        out: dict[int, list[ray.ObjectRef[Any]]] = {}
        for own, parcels in zip(asked, given, strict=True):
            for holder, parcel in zip(own, parcels, strict=True):
                out.setdefault(holder, []).append(parcel)
        return out

    async def load_copy(self, name: str, path: Path) -> None:
        await self._all("load_copy", [(name, path.resolve())] * len(self._ranks))

    async def publish(self, *, version: int) -> PublishReport:
        self._version = version
        served = version_of(version, self.life)
        report: PublishReport = (await self._all("publish", [(served,)] * len(self._ranks)))[0]
        return replace(report, version=version)

    async def save(self, path: Path, *, asynchronous: bool = False) -> None:
        await self._all("save", [(path.resolve(), asynchronous)] * len(self._ranks))

    async def finish_save(self, *, wait: bool) -> bool:
        return all(await self._all("finish_save", [(wait,)] * len(self._ranks)))

    async def load(self, path: Path, *, version: int | None = None) -> None:
        """version: the version of the loaded weights, if no publication follows."""
        await self._all("load", [(path.resolve(),)] * len(self._ranks))
        self._version = self._version if version is None else version

    async def sleep(self) -> Mapping[str, int]:
        """Frees the devices' memory of parameters, gradients and optimizer state until `wake`; returns the bytes freed
        on all ranks by part. Meanwhile only `publish`, `finish_save` and `close` may be called."""
        freed: list[Mapping[str, int]] = await self._all("sleep", [()] * len(self._ranks))
        return {part: sum(one[part] for one in freed) for part in freed[0]}

    async def wake(self) -> None:
        """Restores what `sleep` freed."""
        await self._all("wake", [()] * len(self._ranks))

    async def close(self) -> None:
        self._closed = True
        for rank in self._ranks:
            ray.kill(rank)

    async def lost(self) -> RanksLostError:
        """Waits until the process of a rank has ended, whether or not a call waits for it. Never returns once the ranks
        are closed."""
        found = await first_deaths(self._ranks)
        if self._closed:
            await asyncio.Event().wait()
        return self._lost_error(self._under_way, [self._lost_rank(i, found[i]) for i in sorted(found)])

    def end(self) -> list[str]:
        """Kills the processes of all ranks, also those stopped by a signal, and waits until they have ended, 20 s at
        most. Returns the names of those that remain."""
        self._closed = True
        left = end_processes(self._node_ids, self._pids)
        for rank in self._ranks:
            ray.kill(rank)
        return [f"{self._role} rank {i} on node {self._addresses[i]}" for i in left]

    def _ship(self, batch: TrainBatch) -> _Shipped:
        """Put a batch into the object store: for each rank its DP shard without routes, then its part of the shard's
        routes. Ranks that need the same shard or part share one object."""
        sent = [self.put([replace(m, routing=None) for m in shard]) for shard in batch.grid]
        cut = {(dp, part): cut_shard(batch.grid[dp], part) for dp, part in dict.fromkeys(self._places)}
        puts = {place: self.put(routes) for place, routes in cut.items()}
        nbytes = sum(r.nbytes for routes in cut.values() for r in routes if r is not None)
        routed = any(m.routing is not None for shard in batch.grid for m in shard)
        refs = [(sent[place[0]], puts[place]) for place in self._places]
        return _Shipped(refs, nbytes if routed else None)

    async def _pull(self, batch: PlannedBatch) -> _Shipped:
        """Let the holders of the samples put what each place needs into the object store: for each rank its planned
        shard, then the portion of each holder."""
        if self.columns is None:
            raise RuntimeError("a batch of records needs RayTrainer.columns, the holders of their values")
        places = self._places
        if batch.only is not None:  # without routes a row is the same for all of its ranks
            parts = dict(reversed(places))
            places = [(row, parts[row]) for row, _ in places]
        pulled = await self.columns.pull(batch, list(dict.fromkeys(places)))
        sent = [self.put(row) for row in batch.grid]
        refs = [(sent[place[0]], *pulled.portions[place]) for place in places]
        return _Shipped(refs, pulled.route_bytes)

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = zip(self._ranks, arguments, strict=True)
        return await self._answers(method, lambda: [getattr(r, method).remote(*a) for r, a in calls])

    async def _given(
        self, method: str, arguments: Sequence[tuple[Any, ...]], counts: Sequence[int]
    ) -> list[Sequence[ray.ObjectRef[Any]]]:
        """References to what each rank gives, `counts` values after a None."""
        given: list[Sequence[ray.ObjectRef[Any]]] = []

        def call() -> list[Any]:
            first = []
            for rank, own, n in zip(self._ranks, arguments, counts, strict=True):
                found = getattr(rank, method).options(num_returns=1 + n).remote(*own)
                done, *values = found if n else [found]
                first.append(done)
                given.append(values)
            return first

        await self._answers(method, call)
        return given

    async def _answers(self, method: str, call: Callable[[], list[Any]]) -> list[Any]:
        began, limit = self._begin_call(method)
        refs = call()
        answers = [asyncio.ensure_future(ref) for ref in refs]
        for answer in answers:
            answer.add_done_callback(ignore_exception)
        try:
            if await timed_out(answers, limit):
                late = [i for i, answer in enumerate(answers) if not answer.done()]
                raise await asyncio.to_thread(self._timed_out, method, late, limit)
            for answer in answers:
                if answer.done():
                    answer.result()  # raises where it failed; the others may not have answered yet
            self._deadlines.note(method, time.monotonic() - began)
            return [answer.result() for answer in answers]
        except RayError as e:
            cause = await root_cause(e, answers)
            dead = {i: e for i, a in enumerate(answers) if a.done() and isinstance(e := a.exception(), LOST)}
            if dead:
                raise self._lost_error(method, [self._lost_rank(i, why_died(e)) for i, e in dead.items()]) from None
            raise RuntimeError(f"{method}: {error_message(cause)}") from None
        finally:
            self._under_way = None
            for answer in answers:
                answer.cancel()

    def _call_first(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `_all`, without an event loop, on the first `len(arguments)` ranks: the first that fails is named."""
        began, limit = self._begin_call(method)
        refs = [getattr(r, method).remote(*a) for r, a in zip(self._ranks, arguments, strict=False)]
        left = list(refs)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=max(0.0, began + limit - time.monotonic()))
            if not done:
                late = [refs.index(ref) for ref in left]
                raise self._timed_out(method, late, limit)
            try:
                ray.get(done[0])
            except RayError as e:
                i, cause = first_cause(refs.index(done[0]), e, refs)
                if isinstance(cause, LOST):
                    raise self._lost_error(method, [self._lost_rank(i, why_died(cause))]) from None
                raise RuntimeError(f"{self._role} rank {i}: {error_message(cause)}") from None
        self._under_way = None
        self._deadlines.note(method, time.monotonic() - began)
        out: list[Any] = ray.get(refs)
        return out

    def _begin_call(self, method: str) -> tuple[float, float]:
        """(current time, time limit) in seconds. Raises RanksLostError after an earlier call exceeded its limit."""
        if self._stuck is not None:
            raise self._stuck
        self._under_way = method
        return time.monotonic(), self._deadlines.limit(method)

    def _lost_rank(self, i: int, why: str) -> LostRank:
        return LostRank(role=self._role, index=i, node=self._addresses[i], why=why)

    def _lost_error(self, method: str | None, lost: Sequence[LostRank]) -> RanksLostError:
        """method: the call that was under way; None: the ranks were idle."""
        named = ", ".join(f"{one.role} rank {one.index} on node {one.node}: {one.why}" for one in lost)
        during = "between two calls" if method is None else method
        return RanksLostError(f"{during}: {named}", "see logs/ in the run directory, then run again", lost)

    def _timed_out(self, method: str, late: list[int], limit: float) -> RanksLostError:
        """Keep the stacks of all ranks and of this process; return the error that names the late ranks, and the one
        that the others wait for."""
        why = f"did not answer within {limit:g} s"
        what = f"{method}: {self._role} {format_ranks(late)} of {len(self._ranks)} {why}"
        found = write_stacks(self._node_ids, self._pids, self._logs)
        root, logs = root_of(found), self._logs[0].parent
        named = {f"{self._role} rank {i}": found[i] for i in sorted(found)}
        report = write_report(logs.parent / "stacks", f"{self._role}_{method}", f"{what}\nroot: {root}", named)
        stacks = f"the stacks could not be written; see {logs}"
        if found:
            of_driver = "" if report is None else f", and with the driver's in {report}"
            stacks = f"the stacks of all ranks are at the end of {logs}/{self._role}_rank*.log{of_driver}"
        self._stuck = RanksLostError(
            f"{what}{root and '; '}{root}",
            f"{stacks}; {cluster_gist()}; raise cluster.timeout_s if the work was only slow, and run again",
            [self._lost_rank(i, why) for i in late],
        )
        return self._stuck
