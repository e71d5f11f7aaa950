"""The ids of many prompts in 12 bytes each, in place of a dictionary of some 150."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.int64]


class Ids:
    """Prompt id -> its number, from 0 to n - 1.

    hashes: [n], Python's `hash` of each id, the same only within this process; id_of: the id of a number, which
    separates equal hashes.
    """

    def __init__(self, hashes: Hashes, id_of: Callable[[int], str]) -> None:
        self._id_of = id_of
        order = np.argsort(hashes, kind="stable")
        self._sorted = hashes[order]
        self._numbers = order.astype(np.uint32 if len(order) < 1 << 32 else np.uint64)

    def find(self, prompt_id: str) -> int | None:
        """The first number with this id."""
        wanted = hash(prompt_id)
        at = int(np.searchsorted(self._sorted, wanted))
        while at < len(self._sorted) and self._sorted[at] == wanted:
            number = int(self._numbers[at])
            if self._id_of(number) == prompt_id:
                return number
            at += 1
        return None

    def twice(self) -> tuple[int, int] | None:
        """The first number whose id an earlier number has, as (earlier, it); None if all ids differ."""
        same = np.flatnonzero(self._sorted[1:] == self._sorted[:-1]) + 1
        for number in np.sort(self._numbers[same]).tolist():
            if (first := self.find(self._id_of(number))) != number:
                assert first is not None
                return first, number
        return None
