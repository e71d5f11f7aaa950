"""The inputs of a forward pass as they are sent to the other ranks: 32-bit integers, and pages in place of their slots.

Letters: as in `rollout.embedded.model.batch`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.embedded.model.batch import Chunk, ForwardBatch

Ints = NDArray[np.int32]


class PackedChunk(NamedTuple):
    rows: tuple[int, int]
    key_pages: Ints  # [B, pages that L positions fill]
    length: int  # L
    q_start: Ints
    pad: Ints | None
    unpad: Ints | None


class Packed(NamedTuple):
    tokens: Ints
    positions: Ints
    slots: Ints
    chunks: tuple[PackedChunk, ...]


def pack(batch: ForwardBatch, page: int) -> Packed:
    """page: slots of a page of the cache; positions of a sequence fill whole pages, in order. Slots, tokens and
    positions are below 2^31: a cache of more slots does not fit in any memory."""
    chunks = tuple(
        PackedChunk(
            rows=(c.rows.start, c.rows.stop),
            key_pages=_ints(c.key_slots[:, ::page] // page),
            length=c.key_slots.shape[1],
            q_start=_ints(c.q_start),
            pad=None if c.pad is None else _ints(c.pad),
            unpad=None if c.unpad is None else _ints(c.unpad),
        )
        for c in batch.chunks
    )
    return Packed(_ints(batch.tokens), _ints(batch.positions), _ints(batch.slots), chunks)


def unpack(packed: Packed, page: int) -> ForwardBatch:
    """Slots past the end of a sequence, which are masked, may be others than those that were packed."""
    within = torch.arange(page)
    chunks = [
        Chunk(
            rows=slice(*c.rows),
            key_slots=(_tensor(c.key_pages)[:, :, None] * page + within).flatten(1)[:, : c.length],
            q_start=_tensor(c.q_start),
            pad=None if c.pad is None else _tensor(c.pad),
            unpad=None if c.unpad is None else _tensor(c.unpad),
        )
        for c in packed.chunks
    ]
    return ForwardBatch(
        tokens=_tensor(packed.tokens), positions=_tensor(packed.positions), slots=_tensor(packed.slots), chunks=chunks
    )


def _ints(t: Tensor) -> Ints:
    return t.numpy().astype(np.int32)


def _tensor(ints: Ints) -> Tensor:
    return torch.from_numpy(ints.astype(np.int64))
