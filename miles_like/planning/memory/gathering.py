"""Bytes of a rank while weights are published: whole tensors are gathered in chunks, as in
megatron_bridge/weights/export.py.

A chunk has 256 MiB, or one parameter if that is larger: an embedding, or one local expert of every expert-parallel
rank. A rank that owns it holds the gathered shards and a flat copy for the broadcast to the other stages, which hold
the flat copy. The loop over the tensors holds the last one of the chunk before.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import Entry, Precision, Split
from miles_like.planning.memory.weights import ModelWeights, StageWeights

CHUNK_BYTES = 256 << 20  # BUCKET_BYTES of export.py and CHUNK_BYTES of pacing.py, which a test compares


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Bytes of one chunk of parameters: `chunk`, of its complete tensors; `owned`, the most that a rank of the stage
    that has the parameters holds while they are gathered; `kept`, what that rank holds as long as one tensor of the
    chunk is in use (0 where tensors are views of parameters)."""

    chunk: int
    owned: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """The two largest chunks of each kind of parameters of a stage, in the order in which they are gathered."""

    largest: tuple[Gathered, ...]

    @property
    def chunk(self) -> int:
        """Bytes of the complete tensors of the largest chunk."""
        return max(g.chunk for g in self.largest)

    @property
    def owned(self) -> int:
        """The most bytes that a rank of the stage holds while one of the chunks is gathered."""
        return max(g.owned for g in self.largest)


def gathering(weights: ModelWeights, layout: ParallelConfig, stage: StageWeights) -> Gathering:
    """The chunks of a stage. A chunk has parameters of one kind (experts, replicated ones or others) and of one
    dtype."""
    kinds: defaultdict[tuple[bool, bool, bool], list[Entry]] = defaultdict(list)
    known: dict[int, tuple[bool, bool, bool]] = {}  # by the id of an entry, which most layers have
    for entry in weights.entries(layout, stage):
        if id(entry) not in known:
            fp32 = weights.tensors.dtype(entry).itemsize == 4
            known[id(entry)] = entry.per_expert, entry.split is Split.REPLICATED, fp32
        kinds[known[id(entry)]].append(entry)
    of_kinds = (_of_kind(weights, layout, kinds[kind]) for kind in sorted(kinds))
    return Gathering(largest=tuple(g for largest in of_kinds for g in largest))


def gathering_bytes(stages: Sequence[Gathering], stage: int) -> int:
    """The most bytes that a rank of `stage` holds beside its parameters during a publication: for chunks of its
    stage, or for those that it receives from another. The loop over the tensors still holds one tensor, and so the
    whole, of the chunk before. Stages follow each other; the last chunk of the stage before has experts, whose size is
    taken from this stage's."""
    own, others = stages[stage].largest, [g.largest for other, g in enumerate(stages) if other != stage]
    received = max((_while_held(0, [g.chunk for g in one], one) for one in others), default=0)
    return max(_while_held(own[-1].kept if others else 0, [g.owned for g in own], own), received)


def _while_held(held: int, needed: Sequence[int], chunks: Sequence[Gathered]) -> int:
    """held: bytes of the chunk before the first."""
    before = [held, *(g.kept for g in chunks)]
    return max(kept + now for kept, now in zip(before, needed, strict=False))


def _of_kind(weights: ModelWeights, layout: ParallelConfig, entries: Sequence[Entry]) -> list[Gathered]:
    """The two largest chunks. One with several parameters has them in the proportion in which the stage has them."""
    inner, every, merged = _inner(layout, entries[0]), 0, 0
    known: dict[int, tuple[int, int, bool]] = {}  # by the id of an entry
    slots: list[tuple[int, Entry]] = []
    for entry in entries:
        if id(entry) not in known:
            count = weights.local_experts(layout, entry)
            known[id(entry)] = _slot(weights, layout, entry), count, _copies(entry, inner)
        nbytes, count, copies = known[id(entry)]
        every += count * nbytes
        merged += count * nbytes * copies
        slots += [(nbytes, entry)] * min(count, 2)
    copied = merged / every
    found, left = list[Gathered](), every
    for nbytes, entry in heapq.nlargest(2, slots, key=_size):
        alone = nbytes >= min(CHUNK_BYTES, left)
        chunk = nbytes if alone else min(CHUNK_BYTES, left)
        if chunk > 0:
            share = float(_copies(entry, inner)) if alone else copied
            found.append(_gathered(layout, entries[0], chunk, int(share * chunk), casts=_casts(weights, entry)))
        left -= chunk
    return found


def _size(slot: tuple[int, Entry]) -> int:
    return slot[0]


def _inner(layout: ParallelConfig, entry: Entry) -> int:
    return 1 if entry.split is Split.REPLICATED else layout.etp if entry.per_expert else layout.tp


def _casts(weights: ModelWeights, entry: Entry) -> bool:
    """Whether what is sent is made of the parameters: they have another dtype than the checkpoint, or an adapter."""
    if weights.is_adapted(entry):
        return True
    width = 4 if weights.config.params_dtype == "float32" or entry.precision is Precision.FP32 else 2
    return width != weights.tensors.dtype(entry).itemsize


def _gathered(layout: ParallelConfig, entry: Entry, chunk: int, merged: int, *, casts: bool) -> Gathered:
    """merged: bytes of the tensors of which `_merge` copies the shards; casts: as `_casts`."""
    outer = layout.ep if entry.per_expert else 1  # experts are gathered over both groups, one after the other
    inner = _inner(layout, entry)
    gathered = chunk if outer * inner > 1 else 0
    shards = chunk // outer if outer > 1 else chunk // inner if inner > 1 else 0  # concatenated, to be gathered
    before = chunk // outer if outer > 1 and inner > 1 else 0  # gathered over the inner group
    flat = chunk if layout.pp > 1 else 0
    cast = chunk // (outer * inner) if casts else 0  # alive while the tensors are merged
    owned = max(cast + before + shards + gathered, cast + gathered + merged, (merged or gathered or cast) + flat)
    return Gathered(chunk=chunk, owned=owned, kept=flat or gathered or max(merged, cast))


def _slot(weights: ModelWeights, layout: ParallelConfig, entry: Entry) -> int:
    """Bytes of one slot of export.py: a parameter, or a local expert's on each expert-parallel rank."""
    copies = layout.ep if entry.per_expert else 1
    itemsize = weights.tensors.dtype(entry).itemsize
    return int(copies * math.prod(weights.tensors.megatron_shape(entry)) * itemsize)


def _copies(entry: Entry, ranks: int) -> bool:
    """Whether `_merge` copies the shards: not where the whole parameter is one shard, or one view of it."""
    return entry.split is Split.QKV or (ranks > 1 and entry.split is not Split.REPLICATED)
