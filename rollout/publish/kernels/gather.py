"""A Triton kernel that gathers the tensors of a bucket into one buffer of bytes, in one launch.

The plain way is a copy for each tensor, and a bucket of small ones takes as long as their launches. Each byte is read
once and written once, which is what has to be moved; the table of pieces adds 32 bytes to 32 KiB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

PIECE = 32 << 10  # bytes that a program copies
TILES = {"WORDS": 4096, "BYTES": 4096}  # that it has in registers at a time
WARPS = 8
_COLUMNS = 4  # of the table: address to read, address to write, bytes, and a place that fills 32 bytes


@triton.jit
def _copied(source, target, size, WORD: tl.constexpr, BYTES: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """TILE words at a time."""
    read, write = source.to(tl.pointer_type(WORD)), target.to(tl.pointer_type(WORD))
    words = size // BYTES
    if ALIGNED:
        read, write, words = tl.multiple_of(read, 16), tl.multiple_of(write, 16), tl.multiple_of(words, 16 // BYTES)
    for first in range(0, words, TILE):
        at = first + tl.arange(0, TILE)
        tl.store(write + at, tl.load(read + at, mask=at < words), mask=at < words)


@triton.jit
def gather_kernel(table, WORDS: tl.constexpr, BYTES: tl.constexpr):
    """A program: one row of table int64 [pieces, 4]. 16 bytes at a time where both addresses and the size are
    multiples of 16, else 4 where they are of 4, else 1; WORDS words of 4 bytes, or BYTES bytes, before the next."""
    row = table + tl.program_id(0) * 4
    source, target, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    odd = source | target | size
    if odd % 16 == 0:
        _copied(source, target, size, tl.int32, 4, True, WORDS)
    elif odd % 4 == 0:
        _copied(source, target, size, tl.int32, 4, False, WORDS)
    else:
        _copied(source, target, size, tl.uint8, 1, False, BYTES)


def pieces(sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]) -> NDArray[np.int64]:
    """[pieces, 4] rows of at most PIECE bytes, of tensors at addresses `sources` and `targets`, of `sizes` bytes."""
    nbytes = np.asarray(sizes, np.int64)
    counts = -(-nbytes // PIECE)
    owner = np.repeat(np.arange(len(nbytes)), counts)
    first = np.cumsum(counts) - counts
    start = (np.arange(len(owner)) - first[owner]) * PIECE
    table = np.zeros((len(owner), _COLUMNS), np.int64)
    table[:, 0] = np.asarray(sources, np.int64)[owner] + start
    table[:, 1] = np.asarray(targets, np.int64)[owner] + start
    table[:, 2] = np.minimum(PIECE, nbytes[owner] - start)
    return table


def gather(buffer: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> None:
    """Copies contiguous tensors of any dtypes to their first bytes `starts` in buffer, uint8 on their device. Does not
    wait for the device."""
    base = buffer.data_ptr()
    rows = pieces([t.data_ptr() for t in tensors], [base + s for s in starts], [t.nbytes for t in tensors])
    if not len(rows):
        return
    on_host = torch.from_numpy(rows)
    if buffer.is_cuda:
        on_host = on_host.pin_memory()
    table = on_host.to(buffer.device, non_blocking=True)
    with torch.cuda.device_of(buffer):
        gather_kernel[(len(rows),)](table, **TILES, num_warps=WARPS)
