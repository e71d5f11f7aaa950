"""A matrix in tiles that stay in the caches of the cores.

Elementwise work on a whole weight is bound by memory: each of a dozen operations reads and writes all of it. On a tile
the temporaries stay in the caches. A tile grows with PyTorch's threads, which split each operation on it always alike,
so that each core keeps its own part; Python threads with a tile each lose more time in handing over the interpreter's
lock than they gain. No result depends on the size of a tile or the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 18  # of a tile for each thread: 1 MiB in fp32
CUDA_ELEMENTS = 1 << 26
_SHORT = 16  # columns
_COLUMNS = 2048  # wider tiles have few rows, and reductions over rows like them tall

Tile = tuple[slice, slice]  # rows, columns


def tile_elements(device: torch.device) -> int:
    return CPU_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else CUDA_ELEMENTS


def tiles(shape: tuple[int, int], block: tuple[int, int], elements: int) -> Iterator[Tile]:
    """Cuts [n, k] so that no block is cut: a tile has whole blocks only, or is the rest of rows or columns that is
    smaller than one. A tile has about `elements`, and never less than a block."""
    (n, k), (bn, bk) = shape, block
    wide = max(bk, min(elements // min(bn, n), max(_COLUMNS, elements // n)) // bk * bk)
    columns = list(_runs(k, bk, wide))
    for rows in _runs(n, bn, max(bn, elements // min(wide, k) // bn * bn)):
        for part in columns:
            yield rows, part


def _runs(length: int, block: int, step: int) -> Iterator[slice]:
    whole = length // block * block
    for a in range(0, whole, step):
        yield slice(a, min(whole, a + step))
    if whole < length:
        yield slice(whole, length)


def amax_bits(w: Tensor, block: tuple[int, int]) -> Tensor:
    """w bf16 [B, r, c], whole blocks or one smaller -> int16 [B, r/bn, c/bk], the bits of each block's largest
    magnitude.

    bf16 magnitudes are ordered as their bits are, and integers are compared several times faster. A block with a NaN
    or an infinity gives bits of 0x7F80 or above.
    """
    b, r, c = w.shape
    bn, bk = min(block[0], r), min(block[1], c)
    magnitude = w.abs().view(torch.int16)
    if bn > 1:
        magnitude = magnitude.view(b, r // bn, bn, c).amax(2)
    magnitude = magnitude.view(b, r // bn, c // bk, bk)
    if (
        bk == 2 * _SHORT
    ):  # halves side by side: reductions of rows below 64 are several times slower than of longer ones
        magnitude = torch.maximum(magnitude[..., :_SHORT], magnitude[..., _SHORT:])
    return magnitude.amax(3)
