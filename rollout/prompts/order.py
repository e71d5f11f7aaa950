"""The order in which the rows of a file are taken, and the position in it."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import NamedTuple


class Cursor(NamedTuple):
    """A position in the order: `position` rows of epoch `epoch` were taken or skipped."""

    epoch: int
    position: int


class Order:
    """Row numbers 0..n-1, each once per epoch, in an order that depends only on (seed, epoch). It takes 4 bytes a row.

    epochs: number of epochs after which it ends; None: it never ends.
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

    def next(self, skipped: Callable[[int], bool] = lambda row: False) -> int | None:
        """The next row that is not skipped; None at the end. Calls `skipped` once for each row."""
        while not self.ended:
            epoch, position = self.cursor
            row = self._rows[position]
            if position + 1 == self._n:
                self._rows = self._shuffled(epoch + 1)
                self.cursor = Cursor(epoch + 1, 0)
            else:
                self.cursor = Cursor(epoch, position + 1)
            if not skipped(row):
                return row
        return None

    def take(self, k: int) -> list[int]:
        """The next k rows, or fewer at the end. May span epochs."""
        out: list[int] = []
        while len(out) < k and (row := self.next()) is not None:
            out.append(row)
        return out

    def restore(self, cursor: Cursor) -> None:
        """Return to `cursor`: with the same n and seed, the same rows follow. Raises ValueError if there is no such
        row."""
        epoch, position = cursor
        if not (epoch >= 0 and 0 <= position < self._n):
            raise ValueError(
                f"a cursor at prompt {position} of epoch {epoch} does not fit {self._n} prompts: use data.train "
                "as it was when the checkpoint was saved"
            )
        self.cursor = cursor
        self._rows = self._shuffled(epoch)

    def _shuffled(self, epoch: int) -> array[int]:
        order = array("I", range(self._n))
        # a str seed is hashed with SHA-512, the same in every process; the hash of a tuple is not
        random.Random(f"prompts {self._seed} {epoch}").shuffle(order)
        return order
