"""Layout of a forward pass: the rows of each sequence, and the cache slots that they attend to.

Letters: T packed tokens, B sequences of a chunk, Q query rows per sequence, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.embedded.model.batch import Chunk, ForwardBatch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SequenceRows:
    """New tokens of one sequence."""

    tokens: Tensor  # [n] int64
    start: int  # position of the first one, and number of cached tokens
    slots: Tensor  # int64, at least start + n elements: cache slot of every position


def _cuts(lengths: Sequence[int] | NDArray[np.int64], budget: int) -> list[slice]:
    """Consecutive runs whose padded size (count * longest) stays within `budget`; a single one may exceed it."""
    out, first, longest = [], 0, 0
    for i, n in enumerate(lengths):
        longest = max(longest, int(n))
        if i > first and longest * (i + 1 - first) > budget:
            out.append(slice(first, i))
            first, longest = i, int(n)
    return [*out, slice(first, len(lengths))]


def lay_out(rows: Sequence[SequenceRows], *, width_bytes: int, token_bytes: int) -> ForwardBatch:
    """Layout of sequences of several new tokens each, in the given order.

    Chunks gather at most `width_bytes` of a layer's cache, with `token_bytes` per token. The tokens of a sequence are
    not split.
    """
    counts = [len(r.tokens) for r in rows]
    first = np.concatenate([[0], np.cumsum(counts)])
    ends = [r.start + n for r, n in zip(rows, counts, strict=True)]
    chunks = []
    for run in _cuts(ends, width_bytes // token_bytes):
        mine, n = rows[run], torch.tensor(counts[run])
        length, q = max(ends[run]), int(n.max())
        keys = torch.zeros(len(mine), length, dtype=torch.int64)
        for j, (r, end) in enumerate(zip(mine, ends[run], strict=True)):
            keys[j, :end] = r.slots[:end]
        real = torch.arange(q) < n[:, None]  # [B, Q]
        pad = torch.zeros(len(mine), q, dtype=torch.int64)
        pad[real] = torch.arange(int(n.sum()))
        chunks.append(
            Chunk(
                rows=slice(int(first[run.start]), int(first[run.stop])),
                key_slots=keys,
                q_start=torch.tensor([r.start for r in mine]),
                pad=pad if q > 1 else None,
                unpad=real.flatten().nonzero()[:, 0] if q > 1 else None,
            )
        )
    return ForwardBatch(
        tokens=torch.cat([r.tokens for r in rows]),
        positions=torch.cat([torch.arange(r.start, e) for r, e in zip(rows, ends, strict=True)]),
        slots=torch.cat([r.slots[r.start : e] for r, e in zip(rows, ends, strict=True)]),
        chunks=chunks,
    )


def lay_out_decode(
    tokens: Tensor, positions: NDArray[np.int64], table: Tensor, rows: Tensor, *, width_bytes: int, token_bytes: int
) -> ForwardBatch:
    """Layout of one new token of each of B sequences, ascending by position. tokens [B]; table [R, W]: slots; rows [B]:
    indices into table."""
    pos = torch.from_numpy(positions)
    chunks = []
    lengths = positions + 1
    assert (lengths[1:] >= lengths[:-1]).all(), "a chunk's last sequence is taken for its longest"
    for run in _decode_cuts(lengths, width_bytes // token_bytes):
        length = int(lengths[run.stop - 1])
        keys = table.narrow(1, 0, length).index_select(0, rows[run])
        chunks.append(Chunk(rows=run, key_slots=keys, q_start=pos[run], pad=None, unpad=None))
    return ForwardBatch(tokens=tokens, positions=pos, slots=table[rows, pos], chunks=chunks)


def joined(batches: Sequence[ForwardBatch]) -> ForwardBatch:
    """Concatenates batches into one forward pass."""
    if len(batches) == 1:
        return batches[0]
    sizes = [len(b.tokens) for b in batches]
    chunks = [
        replace(c, rows=slice(start + c.rows.start, start + c.rows.stop))
        for start, b in zip(np.cumsum([0, *sizes[:-1]]).tolist(), batches, strict=True)
        for c in b.chunks
    ]
    return ForwardBatch(
        tokens=torch.cat([b.tokens for b in batches]),
        positions=torch.cat([b.positions for b in batches]),
        slots=torch.cat([b.slots for b in batches]),
        chunks=chunks,
    )


def _decode_cuts(lengths: NDArray[np.int64], budget: int) -> list[slice]:
    """As `_cuts`, for ascending lengths, from the longest down. The shortest length of a chunk is at least half of the
    longest less 16."""
    out, stop = [], len(lengths)
    while stop:
        longest = int(lengths[stop - 1])
        start = max(0, stop - max(1, budget // longest), int(np.searchsorted(lengths, longest // 2 - 16)))
        out.append(slice(start, stop))
        stop = start
    return out[::-1]
