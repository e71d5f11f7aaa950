"""Sequences whose items stay on disk: one temporary file without a name, and 8 bytes of memory an item."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from abc import abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import Any, TypeVar, overload

T = TypeVar("T")

_BUFFER = 1 << 18  # bytes that are written at a time


class Lazy(Sequence[T]):
    """A sequence that makes an item each time it is asked for. A slice is a tuple of items."""

    @abstractmethod
    def _at(self, i: int) -> T:
        """Item i, from 0 to len - 1."""

    @overload
    def __getitem__(self, i: int) -> T: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[T]: ...
    def __getitem__(self, i: int | slice) -> T | Sequence[T]:
        places = range(len(self))[i]
        return self._at(places) if isinstance(places, int) else tuple(map(self._at, places))

    def __iter__(self) -> Iterator[T]:
        return map(self._at, range(len(self)))


class Spool(Lazy[T]):
    """Items that can be pickled, appended to a file in the temporary folder (TMPDIR) that has no name, so that it ends
    with the process. An item is read when it is asked for, by `pread`: mapped pages would count as resident memory.

    path: the file of prompts whose items these are, for messages.
    """

    def __init__(self, path: str) -> None:
        self._path, self._folder = path, "the temporary folder"
        self._ends, self._buffer, self._written = array("Q", [0]), bytearray(), 0
        try:
            self._folder = tempfile.gettempdir()
            self._descriptor, name = tempfile.mkstemp(prefix="miles-like-", dir=self._folder)
            weakref.finalize(self, os.close, self._descriptor)
            os.unlink(name)
        except OSError as e:
            raise self._full(e) from e

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __reduce__(self) -> Any:
        raise TypeError(f"the prompts of {self._path} are in a file of this process: send the items, as a list")

    def append(self, item: T) -> None:
        """Raises ValueError if the folder is full."""
        self._buffer += pickle.dumps(item, pickle.HIGHEST_PROTOCOL)
        self._ends.append(self._written + len(self._buffer))
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def __iter__(self) -> Iterator[T]:
        """Reads many items at a time."""
        self._flush()
        i, ends = 0, self._ends
        while i < len(self):
            start, last = ends[i], max(i + 1, bisect_right(ends, ends[i] + _BUFFER) - 1)
            read = memoryview(os.pread(self._descriptor, ends[last] - start, start))
            for j in range(i, last):
                yield pickle.loads(read[ends[j] - start : ends[j + 1] - start])
            i = last

    def _at(self, i: int) -> T:
        self._flush()
        start, end = self._ends[i], self._ends[i + 1]
        item: T = pickle.loads(os.pread(self._descriptor, end - start, start))  # this process has written it
        return item

    def _flush(self) -> None:
        try:
            while self._buffer:
                n = os.pwrite(self._descriptor, self._buffer, self._written)
                del self._buffer[:n]
                self._written += n
        except OSError as e:
            raise self._full(e) from e

    def _full(self, e: OSError) -> ValueError:
        return ValueError(
            f"{self._path}: its prompts are kept in a temporary file in {self._folder}, which cannot be written after "
            f"{self._written} bytes ({e.strerror}): free space there, or set TMPDIR to another folder"
        )


class Selected(Lazy[T]):
    """Some items of a sequence, by increasing place."""

    def __init__(self, whole: Sequence[T], places: Sequence[int]) -> None:
        self._whole, self._places = whole, places

    def __len__(self) -> int:
        return len(self._places)

    def _at(self, i: int) -> T:
        return self._whole[self._places[i]]


class Joined(Lazy[T]):
    """Sequences one after the other."""

    def __init__(self, parts: Iterable[Sequence[T]]) -> None:
        self._parts = tuple(parts)
        self._ends = list(accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self._parts)

    def _at(self, i: int) -> T:
        part = bisect_right(self._ends, i)
        return self._parts[part][i - (self._ends[part - 1] if part else 0)]
