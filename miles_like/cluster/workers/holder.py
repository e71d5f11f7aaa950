"""The samples whose values of tokens one rollout worker holds, until they are trained or discarded."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from miles_like.batch.packing import check_routes
from miles_like.batch.parcel import Parcel
from miles_like.batch.portion import Portion, portion_of
from miles_like.cluster.workers.link import StoreFullError
from miles_like.loop.old_tokens import losses_of, masked
from miles_like.records import ColumnsLostError, PlannedMicroBatch, RecordGroup, SampleRecord
from miles_like.types import Sample, SampleGroup
from routing_replay.align import ShardSpec


class Objects(Protocol):
    """Where the values are: Ray's object store, or a process's own memory."""

    def put(self, value: Parcel[SampleGroup]) -> Any:
        """A reference. The object lives as long as the reference, or copies of it, do. Raises StoreFullError."""

    def get(self, reference: Any) -> Parcel[SampleGroup]:
        """Raises LookupError for an object that is lost."""


class Wanted(NamedTuple):
    """A sample in a batch: where a holder finds it, and what of it has a loss."""

    key: int
    sample: tuple[int, int]  # its place in the group
    checksum: int
    oldest: int  # as in SampleRecord


class AskedRow(NamedTuple):
    """What a holder is asked for the row of a planned batch."""

    cells: Sequence[PlannedMicroBatch]
    wanted: Mapping[str, Wanted]  # by their names in `cells`, at least one
    parts: Sequence[ShardSpec]
    replayed: bool  # as in PlannedBatch
    only: Sequence[str] | None  # as in PlannedBatch


class _Own(NamedTuple):
    """In place of a reference: a group in this process's own memory, because the store is full."""

    parcel: Parcel[SampleGroup]


Columns = Mapping[str, Tensor]  # streams of a sample, and its CANDIDATES
CANDIDATES = "candidates"


class ColumnHolder:
    """The groups of one worker, and columns that were added to their samples since. number: of the worker, in
    records."""

    def __init__(self, number: int, objects: Objects) -> None:
        self.number = number
        self._objects = objects
        self._held: dict[int, Any] = {}  # key -> reference
        self._bytes: dict[int, int] = {}
        self._added: dict[int, dict[tuple[int, int], dict[str, Tensor]]] = {}  # key -> place of a sample -> its columns
        self._next = 0
        # the store has refused a group, or makes room; until a group of it, or the last one outside of it, is freed
        self._full = False

    @property
    def keys(self) -> Sequence[int]:
        """Of the groups that are held."""
        return tuple(self._held)

    def bytes_of(self, keys: Iterable[int]) -> Mapping[int, int]:
        """Of the values of each group that is held, with the columns that were added."""
        return {key: self._bytes[key] for key in keys if key in self._bytes}

    def keep(self, group: SampleGroup) -> tuple[SampleRecord, ...]:
        """Holds a group; returns the records of its samples. A group without samples is not held."""
        key, self._next = self._next, self._next + 1
        if group.samples:
            self._held[key] = self._put(Parcel(group))
            self._bytes[key] = sum(map(sample_bytes, group.samples))
        return self.records(group, key)

    def _put(self, parcel: Parcel[SampleGroup]) -> Any:
        if not self._full:  # a full store takes seconds to say so
            try:
                return self._objects.put(parcel)
            except StoreFullError:
                self._full = True
        return _Own(parcel)

    @property
    def outside(self) -> Collection[int]:
        """Keys of the groups that the store has no room for."""
        return [key for key, reference in self._held.items() if isinstance(reference, _Own)]

    def copies(self, references: Mapping[int, Any]) -> Mapping[int, Any]:
        """Groups in this process's own memory, to be held in place of their references; without those that are lost.
        For a thread."""
        own = dict[int, Any]()
        for key, reference in references.items():
            with contextlib.suppress(LookupError):
                # a copy: tensors of an object keep it in the store
                own[key] = reference if isinstance(reference, _Own) else _Own(self._objects.get(reference).copied())
        return own

    def take_out(self, copies: Mapping[int, Any]) -> None:
        """Holds copies of groups, so that the store has room."""
        self._held |= {key: own for key, own in copies.items() if key in self._held}
        self._full = True

    def records(self, group: SampleGroup, key: int = -1) -> tuple[SampleRecord, ...]:
        """key: of a group that is held."""
        return tuple(self._record(s, key) for s in group.samples)

    def free(self, keys: Iterable[int]) -> None:
        """A group that is not held is no error."""
        for key in keys:
            if not isinstance(self._held.pop(key, None), _Own | None):
                self._full = False
            self._bytes.pop(key, None)
            self._added.pop(key, None)
        self._full = self._full and bool(self.outside)

    def references(self, keys: Iterable[int]) -> Mapping[int, Any]:
        """The references of groups, which keep them alive after `free`. Raises ColumnsLostError."""
        return {key: self._reference(key) for key in keys}

    def group(self, key: int) -> SampleGroup:
        """Raises ColumnsLostError for a group that is not held."""
        return self.of_reference(key, self._reference(key))

    def of_reference(self, key: int, reference: Any) -> SampleGroup:
        """Raises ColumnsLostError."""
        if isinstance(reference, _Own):
            return reference.parcel.value
        try:
            return self._objects.get(reference).value
        except LookupError as e:
            raise self._lost(key, str(e)) from None

    def add(self, key: int, columns: Mapping[tuple[int, int], Columns]) -> None:
        """Adds columns to samples of a group, by their place, in place of those of the same names. Raises
        ColumnsLostError for a group that is not held."""
        self._reference(key)
        of_group = self._added.setdefault(key, {})
        for place, own in columns.items():
            there = of_group.setdefault(place, {})
            self._bytes[key] += sum(x.nbytes - (there[n].nbytes if n in there else 0) for n, x in own.items())
            there.update(own)

    def values(self, groups: Sequence[RecordGroup]) -> list[SampleGroup]:
        """The groups of records as a process without workers has them: with all columns, and with the rewards and the
        loss tokens of the records. Raises as `portions`."""
        held = self._all(g.samples[0].key for g in groups)
        return [replace(of_records(g, self._whole(held[g.samples[0].key], g)), prompt=g.prompt) for g in groups]

    def portions(self, asked: AskedRow) -> list[Portion]:
        """For each part of the row what its ranks need of the samples.

        Raises ColumnsLostError for a group that is not held, RuntimeError for a sample that is not the one of the
        record, and ValueError as `check_routes` and `portion_of`.
        """
        groups = self._all(dict.fromkeys(of.key for of in asked.wanted.values()))
        samples = {name: self._found(groups[of.key], of) for name, of in asked.wanted.items()}
        if asked.only is None:
            check_routes(list(samples.values()), replayed=asked.replayed)
        found = [portion_of(asked.cells, samples, part, asked.only) for part in asked.parts]
        return [portion for portion in found if portion is not None]

    def _all(self, keys: Iterable[int]) -> dict[int, SampleGroup]:
        """The groups. Raises ColumnsLostError naming all that are lost."""
        found, lost = dict[int, SampleGroup](), list[ColumnsLostError]()
        for key in keys:
            try:
                found[key] = self.group(key)
            except ColumnsLostError as e:
                lost.append(e)
        if lost:
            raise ColumnsLostError(str(lost[0]), [one for e in lost for one in e.lost])
        return found

    def _found(self, group: SampleGroup, of: Wanted) -> Sample:
        sample = next((s for s in group.samples if s.place == of.sample), None)
        if sample is None or checksum_of(sample) != of.checksum:
            what = "is not there" if sample is None else "has other tokens, mask or log-probs than its record"
            raise RuntimeError(
                f"rollout worker {self.number}: sample {of.sample[0]} of prompt {group.prompt.id!r} {what}: its memory "
                "was changed; resume from the last checkpoint"
            )
        return self._with_added(of.key, masked(sample, of.oldest))

    def _whole(self, group: SampleGroup, records: RecordGroup) -> SampleGroup:
        samples = (self._found(group, Wanted(r.key, r.place, r.checksum, r.oldest)) for r in records.samples)
        return replace(group, samples=tuple(samples))

    def _with_added(self, key: int, sample: Sample) -> Sample:
        columns = dict(self._added.get(key, {}).get(sample.place, {}))
        candidates = columns.pop(CANDIDATES, sample.candidates)
        return replace(sample, streams={**sample.streams, **columns}, candidates=candidates) if columns else sample

    def _record(self, s: Sample, key: int) -> SampleRecord:
        return SampleRecord(
            prompt_id=s.prompt_id,
            index=s.index,
            row=s.row,
            length=s.length,
            response_len=s.response_len,
            turns=s.turns,
            versions=s.versions,
            finish=s.finish,
            reward=s.reward,
            reward_parts=s.reward_parts,
            spans=s.spans,
            holder=self.number,
            key=key,
            checksum=checksum_of(s),
            losses=losses_of(s),
        )

    def _reference(self, key: int) -> Any:
        if key not in self._held:
            raise self._lost(key, "it is not held")
        return self._held[key]

    def _lost(self, key: int, why: str) -> ColumnsLostError:
        return ColumnsLostError(f"rollout worker {self.number} has lost group {key}: {why}", [(self.number, key)])


def of_records(records: RecordGroup, group: SampleGroup) -> SampleGroup:
    """The samples with the rewards and the loss tokens of their records: overlong shaping may have reduced rewards, and
    some samples, or old tokens, are not trained."""
    by_place = {r.place: r for r in records.samples}

    def of(s: Sample, r: SampleRecord) -> Sample:
        s = replace(masked(s, r.oldest), reward=r.reward, reward_parts=r.reward_parts)
        return s if r.response_len else s.without_loss()

    return replace(group, samples=tuple(of(s, by_place[s.place]) for s in group.samples))


def added(before: Sample, after: Sample) -> Columns:
    """The columns of `after` that `before` has not."""
    out = {name: x for name, x in after.streams.items() if before.streams.get(name) is not x}
    if after.candidates is not None and after.candidates is not before.candidates:
        out[CANDIDATES] = after.candidates
    return out


def sample_bytes(sample: Sample) -> int:
    """Of the tensors of a sample."""
    routes = sample.routing
    own: list[Tensor | None] = [sample.token_ids, sample.loss_mask, sample.logprobs, sample.candidates]
    if routes is not None:
        own += [routes.experts, routes.checksums, routes.weights]
    return sum(x.nbytes for x in (*own, *sample.streams.values()) if x is not None)


def checksum_of(sample: Sample) -> int:
    """CRC-32 of tokens, loss mask and log-probs; the routes have their own checksums."""
    out = 0
    for x in (sample.token_ids, sample.loss_mask, sample.logprobs):
        out = zlib.crc32(x.contiguous().numpy().data, out)
    return out


def keys_of(groups: Collection[SampleGroup]) -> dict[int, list[int]]:
    """Holder -> keys of the groups of records that it holds."""
    out: dict[int, list[int]] = {}
    for group in groups:
        for s in group.samples[:1]:
            if isinstance(s, SampleRecord):
                out.setdefault(s.holder, []).append(s.key)
    return out
