"""Tiles of a matrix that fit in the caches of the cores.

Elementwise work on a whole weight is memory-bound: each of a dozen operations reads and writes all of it. On a tile the
temporaries stay in the caches. The size of a tile grows with the number of PyTorch's threads, which split each
operation in the same way, so each core keeps its range in cache. Python threads with one tile each lose more time on
the interpreter lock than they gain. No result depends on the size of a tile or the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 18  # of a tile, per thread: 1 MiB in fp32
CUDA_ELEMENTS = 1 << 26
_SHORT = 16  # columns
_COLUMNS = 2048  # of a tile, where possible: reductions over the few rows of a wider one are slower

Tile = tuple[slice, slice]  # rows, columns


def tile_elements(device: torch.device) -> int:
    """Elements of one tile on `device`; on CPU in proportion to the number of PyTorch's threads."""
    return CPU_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else CUDA_ELEMENTS


def tiles(shape: tuple[int, int], block: tuple[int, int], elements: int) -> Iterator[Tile]:
    """Cuts [n, k] into tiles of whole blocks, and of the remaining rows or columns that are smaller than a block. A
    tile has about `elements` elements and at least one block."""
    (n, k), (bn, bk) = shape, block
    wide = max(bk, min(elements // min(bn, n), max(_COLUMNS, elements // n)) // bk * bk)
    columns = list(_runs(k, bk, wide))
    for rows in _runs(n, bn, max(bn, elements // min(wide, k) // bn * bn)):
        for run in columns:
            yield rows, run


def _runs(length: int, block: int, step: int) -> Iterator[slice]:
    whole = length // block * block
    for a in range(0, whole, step):
        yield slice(a, min(whole, a + step))
    if whole < length:
        yield slice(whole, length)


def groups(x: Tensor, size: int) -> Tensor:
    """[B, r, c] -> [B, r, c / size, size], a view."""
    return x.view(*x.shape[:-1], -1, size)


def amax_bits(w: Tensor, block: tuple[int, int]) -> Tensor:
    """w bf16 [B, r, c], whole blocks or a single smaller one -> int16 [B, r/bn, c/bk], the bits of each block's largest
    magnitude.

    bf16 magnitudes have the same order as their bits, and integers are compared several times faster. A block with a
    NaN or an infinity gives bits of 0x7F80 or above.
    """
    b, r, c = w.shape
    bn, bk = min(block[0], r), min(block[1], c)
    magnitude = w.abs().view(torch.int16)
    if bn > 1:
        magnitude = magnitude.view(b, r // bn, bn, c).amax(2)
    magnitude = magnitude.view(b, r // bn, c // bk, bk)
    # the two halves first: reductions of rows shorter than 64 are several times slower than of longer ones
    if bk == 2 * _SHORT:
        magnitude = torch.maximum(magnitude[..., :_SHORT], magnitude[..., _SHORT:])
    return magnitude.amax(3)


def divide_(x: Tensor, by: float) -> Tensor:
    """x / by in place, rounded once on every device. torch's CUDA kernels multiply by the reciprocal of a Python number
    (`div_true_kernel_cuda`), whose rounding makes the last bit of a third of all scales differ from the CPU's."""
    return x.div_(torch.full((), by, dtype=x.dtype, device=x.device))
