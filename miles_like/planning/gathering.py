"""Bytes of a rank while weights are published: whole tensors are gathered in chunks, as in
megatron_bridge/weights/export.py.

A chunk has 256 MiB, or one parameter if that is larger: an embedding, or one local expert of every expert-parallel
rank. A rank that owns it holds the gathered shards and a flat copy for the broadcast to the other stages, which hold
the flat copy.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import Entry, Split
from miles_like.planning.weights import ModelWeights, StageWeights

CHUNK_BYTES = 256 << 20  # BUCKET_BYTES of export.py and CHUNK_BYTES of pacing.py, which a test compares


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """What the ranks of one stage hold for the chunks of it."""

    chunk: int  # the largest, bytes of complete tensors
    owned: int  # the most that a rank of the stage holds beside its parameters


def gathering(weights: ModelWeights, layout: ParallelConfig, stage: StageWeights) -> Gathering:
    """Chunks have parameters of one kind: experts, replicated ones or others, of one dtype."""
    kinds: defaultdict[object, list[Entry]] = defaultdict(list)
    for entry in weights.entries(layout, stage):
        kinds[entry.per_expert, entry.split is Split.REPLICATED, weights.tensors.dtype(entry)].append(entry)
    found = [_of_kind(weights, layout, entries) for entries in kinds.values()]
    return Gathering(chunk=max(g.chunk for g in found), owned=max(g.owned for g in found))


def gathering_bytes(stages: Sequence[Gathering], stage: int) -> int:
    """The most that a rank holds beside its parameters: for chunks of its stage, or what it receives of another's."""
    received = max((g.chunk for other, g in enumerate(stages) if other != stage), default=0)
    return max(stages[stage].owned, received)


def _of_kind(weights: ModelWeights, layout: ParallelConfig, entries: Sequence[Entry]) -> Gathering:
    slots = [_slot(weights, layout, entry) for entry in entries]
    every = sum(n * weights.local_experts(layout, entry) for n, entry in zip(slots, entries, strict=True))
    chunk = max(*slots, min(CHUNK_BYTES, every))
    first = entries[0]
    outer = layout.ep if first.per_expert else 1  # experts are gathered over both groups, one after the other
    inner = 1 if first.split is Split.REPLICATED else layout.etp if first.per_expert else layout.tp
    gathered = chunk if outer * inner > 1 else 0
    shards = chunk // outer if outer > 1 else chunk // inner if inner > 1 else 0  # concatenated, to be gathered
    before = chunk // outer if outer > 1 and inner > 1 else 0  # gathered over the inner group
    merged = chunk if any(_copies(entry, inner) for entry in entries) else 0
    flat = chunk if layout.pp > 1 else 0
    return Gathering(chunk=chunk, owned=max(before + shards + gathered, gathered + merged, (merged or gathered) + flat))


def _slot(weights: ModelWeights, layout: ParallelConfig, entry: Entry) -> int:
    """Bytes of one slot of export.py: a parameter, or a local expert's on each expert-parallel rank."""
    copies = layout.ep if entry.per_expert else 1
    itemsize = weights.tensors.dtype(entry).itemsize
    return int(copies * math.prod(weights.tensors.megatron_shape(entry)) * itemsize)


def _copies(entry: Entry, ranks: int) -> bool:
    """Whether `_merge` copies the shards: not where the whole parameter is one shard, or one view of it."""
    return entry.split is Split.QKV or (ranks > 1 and entry.split is not Split.REPLICATED)
