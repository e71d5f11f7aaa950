"""In which order rows of a file are dealt out, and where dealing stands."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class Cursor(NamedTuple):
    """`position` rows of epoch `epoch` are dealt, or were passed over."""

    epoch: int
    position: int


class Order:
    """Row numbers 0..n-1, each once an epoch, in an order that depends on (seed, epoch) only.

    epochs: after so many it has ended; None: never.
    """

    def __init__(self, n: int, *, seed: int | str, epochs: int | None = None) -> None:
        self._n, self._seed, self._epochs = n, seed, epochs
        self.cursor = Cursor(0, 0)
        self._rows = self._shuffled(0)

    def __len__(self) -> int:
        return self._n

    @property
    def ended(self) -> bool:
        return self._epochs is not None and self.cursor.epoch >= self._epochs

    def next(self, passed_over: Callable[[int], bool] = lambda row: False) -> int | None:
        """The next row that is not passed over, of which each is asked once; None: it has ended."""
        while not self.ended:
            epoch, position = self.cursor
            row = self._rows[position]
            if position + 1 == self._n:
                self._rows = self._shuffled(epoch + 1)
                self.cursor = Cursor(epoch + 1, 0)
            else:
                self.cursor = Cursor(epoch, position + 1)
            if not passed_over(row):
                return row
        return None

    def take(self, k: int) -> list[int]:
        """The next k, fewer when it ends. Each epoch deals every row once, in a new order; a take may span two."""
        out: list[int] = []
        while len(out) < k and (row := self.next()) is not None:
            out.append(row)
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
