"""A matrix in tiles that stay in a core's cache, worked on by several threads.

Elementwise work on a whole weight is bound by memory: each of a dozen operations reads and writes all of it. On a tile
the temporaries stay in the cache, and tiles are independent, so threads share them out; each operation on one is too
small for PyTorch to split again. No result depends on the size of a tile or the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

CPU_ELEMENTS = 1 << 18  # of a tile: 1 MiB in fp32
CUDA_ELEMENTS = 1 << 26
_COLUMNS = 2048  # wider tiles have few rows, and reductions over rows like them tall

Tile = tuple[slice, slice]  # rows, columns


def tile_elements(device: torch.device) -> int:
    return CPU_ELEMENTS if device.type == "cpu" else CUDA_ELEMENTS


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


def each(jobs: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Calls all, on as many threads as PyTorch may use; raises what the first of them raised, when all have ended."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1 or len(jobs) == 1:
        for job in jobs:
            job()
        return
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()  # of this thread alone

    def run(first: int) -> None:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            for job in jobs[first::threads]:
                job()

    futures = [_pool(threads).submit(run, i) for i in range(min(threads, len(jobs)))]
    errors = [f.exception() for f in futures]
    for e in errors:
        if e is not None:
            raise e


@lru_cache(maxsize=4)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="quant", initializer=lambda: torch.set_num_threads(1))


def amax_bits(w: Tensor, block: tuple[int, int]) -> Tensor:
    """w bf16 [B, r, c], whole blocks or one smaller -> int16 [B, r/bn, c/bk], the bits of each block's largest
    magnitude.

    bf16 magnitudes are ordered as their bits are, and integers are compared several times faster. A block with a NaN
    or an infinity gives bits of 0x7F80 or above.
    """
    b, r, c = w.shape
    bn, bk = min(block[0], r), min(block[1], c)
    magnitude = w.view(torch.int16).bitwise_and(0x7FFF)
    if bn > 1:
        magnitude = magnitude.view(b, r // bn, bn, c).amax(2)
    magnitude = magnitude.view(b, r // bn, c // bk, bk)
    width = bk
    while width > 8 and width % 2 == 0:  # halves side by side: the reduction of short rows is several times slower
        width //= 2
        magnitude = torch.maximum(magnitude[..., :width], magnitude[..., width:])
    return magnitude.amax(3)
