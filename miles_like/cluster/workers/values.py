"""The values of the tokens that rollout workers hold, for the process that decides: which worker gives which of them to
which ranks, and what is computed from them.

Letters: G samples a prompt, S tokens a sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_like.batch.packing import names_of
from miles_like.cluster.rank import Place
from miles_like.cluster.trainer_ranks import Pulled
from miles_like.cluster.workers.holder import AskedRow, Wanted
from miles_like.cluster.workers.link import SentLostError
from miles_like.cluster.workers.pool import RolloutWorkers
from miles_like.protocols import Algorithm, Numbers, Trainer
from miles_like.records import AnyBatch, ColumnsLostError, PlannedBatch, PlannedMicroBatch, RecordGroup, SampleRecord
from miles_like.types import SampleGroup
from rollout.concurrency import all_or_first_error
from routing_replay.align import ShardSpec


@dataclass(frozen=True, slots=True)
class HeldValues:
    """The ColumnSource of a run's trainers, and the TokenValues of its experience. Every method raises ColumnsLostError
    where a worker has ended or lost samples."""

    workers: RolloutWorkers

    async def pull(self, batch: PlannedBatch, places: Sequence[Place]) -> Pulled:
        """As ColumnSource."""
        rows: dict[int, list[ShardSpec]] = {}
        for row, part in places:
            rows.setdefault(row, []).append(part)
        calls = [
            (row, holder, wanted, parts)
            for row, parts in rows.items()
            for holder, wanted in _by_holder(batch, batch.grid[row]).items()
        ]
        found = await all_or_first_error(
            self.workers.exchange(
                holder,
                [of.key for of in wanted.values()],
                "portions",
                AskedRow(batch.grid[row], wanted, parts, batch.replayed, batch.only),
                count=len(parts),
            )
            for row, holder, wanted, parts in calls
        )
        portions: dict[Place, list[Any]] = {place: [] for place in places}
        sizes = list[int]()
        for (row, _, _, parts), (route_bytes, references) in zip(calls, found, strict=True):
            for part, reference, nbytes in zip(parts, references, route_bytes, strict=True):
                portions[row, part].append(reference)
                sizes += [] if nbytes is None else [nbytes]
        return Pulled(portions, sum(sizes) if sizes else None)

    async def logprobs(
        self,
        groups: Sequence[SampleGroup],
        batch: AnyBatch,
        ranks: Trainer,
        *,
        weights: str | None,
        stream: str,
        replay: bool = False,
    ) -> Sequence[SampleGroup]:
        """As TokenValues. The values go from the ranks to the workers."""
        assert isinstance(batch, PlannedBatch), "of records"
        found = await ranks.held_logprobs(batch, weights=weights, replay=replay)
        samples = [s for g in groups for s in g.samples]
        places: dict[int, dict[str, tuple[int, tuple[int, int]]]] = {}
        for name, s in zip(names_of(samples), samples, strict=True):
            assert isinstance(s, SampleRecord), "of records"
            places.setdefault(s.holder, {})[name] = (s.key, s.place)
        await all_or_first_error(
            self.workers.exchange(
                holder, [key for key, _ in own.values()], "keep", stream, own, sent=found.get(holder, ())
            )
            for holder, own in places.items()
        )
        return groups

    async def advantages(self, algorithm: Algorithm, groups: Sequence[SampleGroup]) -> Sequence[Sequence[float | None]]:
        """As TokenValues: None where the workers hold those of the tokens."""
        if (parts := algorithm.parts) is None:
            found: Sequence[Sequence[float | None]] = await self.gathered("advantages", groups)
            return found
        numbers: Sequence[Sequence[Numbers]] = await self.each("measure", groups) if parts.measures else []
        decided = parts.decide(groups, numbers)
        if not parts.places:
            return [[number for (number,) in of_group] for of_group in decided]
        return await self.each("place", groups, decided)

    async def returns(self, algorithm: Algorithm, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        """As TokenValues."""
        await self.each("returns", groups)
        return groups

    async def each(self, what: str, groups: Sequence[SampleGroup], *arguments: Sequence[Any]) -> list[Any]:
        """Lets each worker compute from its groups; numbers of each group. arguments: of each group."""
        own = _places(groups)
        found = await all_or_first_error(
            self.workers.exchange(
                holder, _keys(groups, at), "compute", what, _of(groups, at), *(_of(given, at) for given in arguments)
            )
            for holder, at in own.items()
        )
        out: dict[int, Any] = {}
        for at, (numbers, _) in zip(own.values(), found, strict=True):
            out |= zip(at, numbers, strict=True)
        return [out[i] for i in range(len(groups))]

    async def derived(self, what: str, groups: Sequence[SampleGroup], arguments: Sequence[str]) -> list[SampleGroup]:
        """As TeachingValues."""
        own = _places(groups)
        found = await all_or_first_error(
            self.workers.exchange(holder, _keys(groups, at), "derive", what, _of(groups, at), _of(arguments, at))
            for holder, at in own.items()
        )
        out: dict[int, SampleGroup] = {}
        for (holder, at), ((made, nbytes), _) in zip(own.items(), found, strict=True):
            self.workers.holds(holder, nbytes)
            out |= {i: RecordGroup(prompt=groups[i].prompt, samples=s) for i, s in zip(at, made, strict=True)}
        return [out[i] for i in range(len(groups))]

    async def moved(self, stream: str, groups: Sequence[SampleGroup], derived: Sequence[SampleGroup]) -> None:
        """As TeachingValues."""
        await all_or_first_error(
            self.workers.exchange(holder, _keys(groups, at), "move", stream, _of(groups, at), _of(derived, at))
            for holder, at in _places(groups).items()
        )

    def release(self, groups: Sequence[SampleGroup]) -> None:
        self.workers.release(groups)

    async def gathered(self, what: str, groups: Sequence[SampleGroup]) -> list[Any]:
        """As `each`, by one worker, to which the others lend their groups."""
        own = _places(groups)
        lent = await all_or_first_error(
            self.workers.exchange(holder, _keys(groups, at), "lend", _of(groups, at), count=1)
            for holder, at in own.items()
        )
        first = max(own, key=lambda holder: len(own[holder]))
        sent, orders = [reference for _, (reference,) in lent], list(own.values())
        try:
            numbers, columns = await self.workers.exchange(
                first, _keys(groups, own[first]), "gather", what, orders, sent=sent, count=len(orders)
            )
        except SentLostError as e:  # a lender has ended since; which one is not known
            lenders = {(holder, key) for holder, at in own.items() if holder != first for key in _keys(groups, at)}
            raise ColumnsLostError(f"rollout worker {first} has not got what others lent it: {e}", lenders) from None
        await all_or_first_error(
            self.workers.exchange(holder, _keys(groups, at), "add", _of(groups, at), sent=[reference])
            for (holder, at), reference in zip(own.items(), columns, strict=True)
        )
        return list(numbers)


def _places(groups: Sequence[SampleGroup]) -> dict[int, list[int]]:
    """Holder -> the places of its groups."""
    out: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        for s in group.samples[:1]:
            assert isinstance(s, SampleRecord), "of records"
            out.setdefault(s.holder, []).append(i)
    return out


def _of(values: Sequence[Any], at: Iterable[int]) -> list[Any]:
    return [values[i] for i in at]


def _keys(groups: Sequence[SampleGroup], at: Iterable[int]) -> list[int]:
    return [s.key for g in _of(groups, at) for s in g.samples[:1]]


def _by_holder(batch: PlannedBatch, cells: Sequence[PlannedMicroBatch]) -> dict[int, dict[str, Wanted]]:
    """Holder -> the samples that it has in a row, under their names there."""
    out: dict[int, dict[str, Wanted]] = {}
    for name in dict.fromkeys(name for cell in cells for name in cell.samples):
        of = batch.records[name]
        out.setdefault(of.holder, {})[name] = Wanted(of.key, of.place, of.checksum, of.oldest)
    return out
