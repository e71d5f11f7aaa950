"""Which samples go into which row and micro-batch: loads into bins of limited size.

What is put into bins are numbers 0, 1, ... with a number of inputs and a load each: samples, or units of several that
stay together.
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
Cost = Callable[[int], float]  # of a sample, from the number of its inputs


def sums_of(units: Ints, values: NDArray[Any]) -> NDArray[Any]:
    """[units]: the sum over the samples of each of `values` [samples]; `units` [samples] are their numbers."""
    sums = np.zeros(units[-1] + 1, dtype=values.dtype)
    np.add.at(sums, units, values)
    return sums


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """start, start + 1, ... of each, `length` long, end to end."""
    return np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)


def loads_of(inputs: Ints, kept: Ints, cost: Cost | None) -> Floats:
    """[samples]: what each weighs in the balance; asked once a length."""
    if cost is None:
        return inputs.astype(np.float64)
    loads = np.zeros(len(inputs))
    lengths, of = np.unique(inputs[kept], return_inverse=True)
    loads[kept] = np.array([cost(n) for n in lengths.tolist()])[of]
    return loads


def spread(ids: Ints, loads: Floats, *, bins: int) -> list[Ints]:
    """Heaviest first to the least loaded bin (Graham 1969: at most 4/3 of the best possible largest load)."""
    heap = [(0.0, b) for b in range(bins)]
    content: list[list[int]] = [[] for _ in range(bins)]
    for i in ids[np.argsort(-loads[ids], kind="stable")].tolist():
        load, b = heap[0]
        content[b].append(i)
        heapq.heapreplace(heap, (load + float(loads[i]), b))
    return [np.array(c, dtype=np.int64) for c in content]


def _first_fit(ids: Ints, inputs: Ints, *, max_tokens: int) -> list[Ints]:
    """Longest first to the first bin with room: at most 11/9 of the fewest possible bins, plus 6/9 (Dosa 2007)."""
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
    """Each row as the same number of bins of at most `max_tokens` inputs; an empty bin waits for the dummy."""
    fitted = [_first_fit(row, inputs, max_tokens=max_tokens) for row in rows]
    count = math.ceil(max(map(len, fitted)) / multiple) * multiple
    out = []
    for row, first_fit in zip(rows, fitted, strict=True):
        even = spread(row, loads, bins=count)
        if any(int(inputs[cell].sum()) > max_tokens for cell in even):
            even = first_fit + [row[:0]] * (count - len(first_fit))
        out.append(even)
    return out
