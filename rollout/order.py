"""In which order rows of a file are dealt out, and where dealing stands."""

from __future__ import annotations

import random
from typing import NamedTuple


class Cursor(NamedTuple):
    """`position` rows of epoch `epoch` are dealt."""

    epoch: int
    position: int


class Order:
    """Row numbers 0..n-1, each once an epoch, in an order that depends on (seed, epoch) only."""

    def __init__(self, n: int, *, seed: int) -> None:
        self._n, self._seed = n, seed
        self.cursor = Cursor(0, 0)
        self._rows = self._shuffled(0)

    def __len__(self) -> int:
        return self._n

    def take(self, k: int) -> list[int]:
        """The next k. Each epoch deals every row once, in a new order; a take may span two."""
        out: list[int] = []
        while len(out) < k:
            epoch, position = self.cursor
            part = self._rows[position : position + k - len(out)]
            out += part
            if position + len(part) == self._n:
                self._rows = self._shuffled(epoch + 1)
                self.cursor = Cursor(epoch + 1, 0)
            else:
                self.cursor = Cursor(epoch, position + len(part))
        return out

    def restore(self, cursor: Cursor) -> None:
        """Go to where `cursor` was; the same n and seed then deal the same rows. Raises ValueError when there is no
        such row."""
        epoch, position = cursor
        if not (epoch >= 0 and 0 <= position < self._n):
            raise ValueError(
                f"a cursor at prompt {position} of epoch {epoch} does not fit {self._n} prompts: "
                "was data.train changed since the checkpoint?"
            )
        self.cursor = cursor
        self._rows = self._shuffled(epoch)

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._n))
        # a str seed is hashed by sha512, the same in every process; a tuple would not be
        random.Random(f"prompts {self._seed} {epoch}").shuffle(order)
        return order
