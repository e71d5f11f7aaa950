"""Bin packing: assigns units to data-parallel rows and to micro-batches of limited size.

A unit is a sample, or several samples that must share a micro-batch. Units are numbered 0, 1, ...; each has a number of
input tokens and a load.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Cost = Callable[[int], float]  # load of a sample with this many input tokens


def sums_of(units: Ints, values: NDArray[Any]) -> NDArray[Any]:
    """[units]: sums of `values` [samples] over the samples of each unit; `units` [samples] holds their unit numbers."""
    sums = np.zeros(units[-1] + 1, dtype=values.dtype)
    np.add.at(sums, units, values)
    return sums


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Concatenated ranges: start, start + 1, ..., start + length - 1 for each pair."""
    out: Ints = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return out


def loads_of(inputs: Ints, kept: Ints, cost: Cost | None) -> Floats:
    """[samples]: the load of each kept sample; `cost` is called once per distinct length. None: the input tokens."""
    if cost is None:
        return inputs.astype(np.float64)
    loads = np.zeros(len(inputs))
    lengths, of = np.unique(inputs[kept], return_inverse=True)
    loads[kept] = np.array([cost(n) for n in lengths.tolist()])[of]
    return loads


def spread(ids: Ints, loads: Floats, *, bins: int) -> list[Ints]:
    """Heaviest first into the least loaded bin (Graham 1969: at most 4/3 of the best possible largest load)."""
    heap = [(0.0, b) for b in range(bins)]
    content: list[list[int]] = [[] for _ in range(bins)]
    for i in ids[np.argsort(-loads[ids], kind="stable")].tolist():
        load, b = heap[0]
        content[b].append(i)
        heapq.heapreplace(heap, (load + float(loads[i]), b))
    return [np.array(c, dtype=np.int64) for c in content]


def _first_fit(ids: Ints, inputs: Ints, *, max_tokens: int) -> list[Ints]:
    """Longest first into the first bin with room: at most 11/9 of the fewest possible bins, plus 6/9 (Dosa 2007)."""
    room = np.full(max(len(ids), 1), max_tokens, dtype=np.int64)
    content: list[list[int]] = []
    for i in ids[np.argsort(-inputs[ids], kind="stable")].tolist():
        b = int((room[: len(content) + 1] >= inputs[i]).argmax())
        if b == len(content):
            content.append([])
        content[b].append(i)
        room[b] -= inputs[i]
    return [np.array(c, dtype=np.int64) for c in content]


def micro_batches(
    rows: Sequence[Ints], inputs: Ints, loads: Floats, *, max_tokens: int, multiple: int
) -> list[list[Ints]]:
    """Splits each row into the same number of bins of at most `max_tokens` inputs; a bin may be empty.

    The number is what first-fit needs for the row that needs most, rounded up to a multiple of `multiple`.
    """
    fitted = [_first_fit(row, inputs, max_tokens=max_tokens) for row in rows]
    count = math.ceil(max(map(len, fitted)) / multiple) * multiple
    out = []
    for row, first_fit in zip(rows, fitted, strict=True):
        even = spread(row, loads, bins=count)
        if any(int(inputs[cell].sum()) > max_tokens for cell in even):
            even = first_fit + [row[:0]] * (count - len(first_fit))
        out.append(even)
    return out
