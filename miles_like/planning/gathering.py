"""Bytes of a rank while weights are published: whole tensors are gathered in chunks, as in
megatron_bridge/weights/export.py.

A chunk has 256 MiB, or one parameter if that is larger: an embedding, or one local expert of every expert-parallel
rank. The rank that owns it holds the gathered shards and a flat copy for the broadcast to the other stages.
"""

from __future__ import annotations

import math

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import Entry, Split
from miles_like.planning.weights import ModelWeights

CHUNK_BYTES = 256 << 20  # BUCKET_BYTES of export.py and CHUNK_BYTES of pacing.py, which a test compares


def chunk_bytes(weights: ModelWeights, layout: ParallelConfig) -> int:
    """Bytes of the largest chunk, complete tensors."""
    return max([_slot(weights, layout, entry) for entry in weights.tensors.entries] + [_filled(weights)])


def gathering_bytes(weights: ModelWeights, layout: ParallelConfig) -> int:
    """The most that a rank holds beside its parameters. The sender holds all tensors of a chunk until they are sent,
    which `Pacer` fills up to the same limit, and one more bucket."""
    tensors, worst = weights.tensors, 0
    filled = _filled(weights)
    for entry in tensors.entries:
        whole = max(_slot(weights, layout, entry), filled)
        ranks = layout.ep * layout.etp if entry.per_expert else layout.tp
        if entry.split is Split.REPLICATED:
            ranks = 1
        own = whole // ranks if ranks > 1 else 0  # concatenated shards of this rank
        gathered = whole if ranks > 1 else 0
        merged = whole if _copies(entry, layout) else 0
        flat = whole if layout.pp > 1 else 0
        worst = max(worst, own + gathered + merged, (merged or gathered) + flat)
    return worst + chunk_bytes(weights, layout)


def _slot(weights: ModelWeights, layout: ParallelConfig, entry: Entry) -> int:
    """Bytes of one slot of export.py: a parameter, or a local expert's on each expert-parallel rank."""
    copies = layout.ep if entry.per_expert else 1
    itemsize = weights.tensors.dtype(entry).itemsize
    return int(copies * math.prod(weights.tensors.megatron_shape(entry)) * itemsize)


def _filled(weights: ModelWeights) -> int:
    """A chunk of several parameters."""
    count = weights.family.parameter_count(weights.hf, mtp=weights.tensors.mtp)
    return min(CHUNK_BYTES, count * weights.tensors.weight_dtype.itemsize)


def _copies(entry: Entry, layout: ParallelConfig) -> bool:
    """Whether `_merge` copies the shards: not where the whole parameter is one shard, or one view of it."""
    ranks = layout.etp if entry.per_expert else layout.tp
    return entry.split is Split.QKV or (ranks > 1 and entry.split is not Split.REPLICATED)
