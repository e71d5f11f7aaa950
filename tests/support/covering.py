"""Few rows of settings in which every two values of two settings meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

Row: TypeAlias = "dict[str, Any]"
Pair: TypeAlias = "tuple[tuple[str, Any], tuple[str, Any]]"
_TRIES = 40


def all_rows(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Every combination that is allowed."""
    rows = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return [row for row in rows if allowed(row)]


def pairs_of(row: Row) -> Iterator[Pair]:
    return itertools.combinations(row.items(), 2)


def covering_rows(factors: Mapping[str, Sequence[Any]], allowed: Callable[[Row], bool]) -> list[Row]:
    """Rows that hold every pair of values that an allowed row holds: the fewest of some greedy choices, the same for
    the same arguments. A row after the other is the one with the most pairs that are missing."""
    every = all_rows(factors, allowed)
    numbers = {pair: 1 << i for i, pair in enumerate({p: None for row in every for p in pairs_of(row)})}
    held = [sum(numbers[pair] for pair in pairs_of(row)) for row in every]
    best: list[int] = []
    for seed in range(_TRIES):
        order = list(range(len(every)))
        random.Random(seed).shuffle(order)  # decides between rows with equally many
        missing, chosen = sum(numbers.values()), list[int]()
        while missing:
            chosen.append(max(order, key=lambda i: (held[i] & missing).bit_count()))
            missing &= ~held[chosen[-1]]
        if not best or len(chosen) < len(best):
            best = chosen
    return [every[i] for i in sorted(best)]
