"""Signals between ranks outside of collectives, through the store that the ranks met at.

A rank that waits for a signal has no collective open, so that no collective's time limit runs while it waits.
"""

from __future__ import annotations

import time

from torch.distributed import DistNetworkError, PrefixStore, TCPStore  # type: ignore[attr-defined]

_SLOWEST_POLL_S = 0.1


class StoreSignals:
    """Named signals, each sent by one rank and awaited by any number of others.

    store: the ranks' rendezvous store, served by rank 0. A clone of it is used: a client of the store answers one
    request at a time, and process groups use the original.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = PrefixStore("signals", store.clone())  # type: ignore[attr-defined]

    def send(self, name: str) -> None:
        self._store.set(name, "")

    def wait_for(self, name: str) -> None:
        """Return once `name` was sent. Raises RuntimeError when rank 0, which serves the store, has ended.

        There is no time limit: the driver limits the call that waits. Polls, with pauses of a tenth of the time waited
        so far, because torch writes a warning to the log each time that its own wait reaches a limit.
        """
        began = time.monotonic()
        try:
            while not self._store.check([name]):
                time.sleep(min(_SLOWEST_POLL_S, 0.0005 + 0.1 * (time.monotonic() - began)))
        except DistNetworkError:
            raise RuntimeError("rank 0 ended while the other ranks waited for it: its log says why") from None

    def forget(self, name: str) -> None:
        """Remove a signal that every rank has seen."""
        self._store.delete_key(name)
