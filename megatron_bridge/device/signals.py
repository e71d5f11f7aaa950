"""Signals and texts between ranks outside of collectives, through the store that the ranks met at.

A rank that waits for a signal has no collective open, so that no collective's time limit runs while it waits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore  # type: ignore[attr-defined]

_SLOWEST_POLL_S = 0.1


class StoreSignals:
    """Named signals, each sent by one rank and awaited by any number of others.

    store: the rendezvous store of `world_size` ranks, served by rank 0. A clone of it is used: a client of the store
    answers one request at a time, and process groups use the original. Every method raises RuntimeError when rank 0 has
    ended.
    """

    def __init__(self, store: TCPStore, world_size: int) -> None:
        self._original, self._world_size = store, world_size
        self._meetings = 0  # so far, on every rank

    @cached_property
    def _store(self) -> PrefixStore:
        """Cloned by the first signal: the store of a fake process group has no clone, and its ranks send none."""
        return PrefixStore("signals", self._original.clone())  # type: ignore[attr-defined]

    def send(self, name: str) -> None:
        with _rank_0_lives():
            self._store.set(name, "")

    def wait_for(self, name: str) -> None:
        """Return once `name` was sent.

        There is no time limit: the driver limits the call that waits. Polls, with pauses of a tenth of the time waited
        so far, because torch writes a warning to the log each time that its own wait reaches a limit.
        """
        began = time.monotonic()
        with _rank_0_lives():
            while not self._store.check([name]):
                time.sleep(min(_SLOWEST_POLL_S, 0.0005 + 0.1 * (time.monotonic() - began)))

    def forget(self, name: str) -> None:
        """Remove a signal that every rank has seen."""
        with _rank_0_lives():
            self._store.delete_key(name)

    def meet(self) -> None:
        """Return once every rank has called this method as often as this rank has. No time limit, as in `wait_for`.

        For the time between work that waits for something outside of the ranks (a disk, the network) and the collective
        that follows it: the collective is opened when the last rank is ready for it.
        """
        if self._world_size == 1:
            return
        self._meetings += 1
        arrived, complete = (f"{what} {self._meetings}" for what in ("arrived at", "all at"))
        with _rank_0_lives():
            last = self._store.add(arrived, 1) == self._world_size
        if last:
            self.forget(arrived)
            self.send(complete)
            if self._meetings > 1:
                self.forget(f"all at {self._meetings - 1}")  # every rank has left that meeting
        self.wait_for(complete)

    def board(self, name: str) -> StoreBoard:
        """A new board at each call; boards of the same name share their texts."""
        return StoreBoard(self._original, name)


class StoreBoard:
    """Texts under names, which ranks leave for each other. Every method raises RuntimeError when rank 0 has ended.

    It has a client of the store, which answers one request at a time: one board for each thread that reads.
    """

    def __init__(self, store: TCPStore, name: str) -> None:
        self._original, self._name = store, name

    @cached_property
    def _store(self) -> PrefixStore:
        return PrefixStore(f"board {self._name}", self._original.clone())  # type: ignore[attr-defined]

    def put(self, name: str, text: str) -> None:
        with _rank_0_lives():
            self._store.set(name, text)

    def number(self, name: str) -> int:
        """The next number, from 1 on, over the calls of all ranks."""
        with _rank_0_lives():
            return self._store.add(name, 1)

    def read(self, name: str, seconds: float) -> str | None:
        """The text as soon as there is one; None after `seconds` without, at once if they are 0. The store wakes the
        reader: one that polled would add a part of its waiting time to each text that passes through many ranks. torch
        writes a warning to the log each time that a wait reaches its limit, so that limits should be long."""
        with _rank_0_lives():
            if not self._store.check([name]):
                if not seconds:
                    return None
                try:
                    self._store.wait([name], timedelta(seconds=seconds))
                except DistStoreError:
                    return None
            return self._store.get(name).decode()

    def remove(self, name: str) -> None:
        """Remove a text or number that no rank reads any more."""
        with _rank_0_lives():
            self._store.delete_key(name)


@contextmanager
def _rank_0_lives() -> Iterator[None]:
    try:
        yield
    except DistNetworkError:
        raise RuntimeError("rank 0 ended while the other ranks waited for it: see its log") from None
