"""The clocks of a run's nodes against the driver's, by round trips (Cristian 1989, Probabilistic clock
synchronization)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

ROUND_TRIPS = 8

# the host of a process and its clock, in nanoseconds as `time.time_ns` counts; raises RuntimeError where it does not
# answer
Ask = Callable[[], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Offset:
    """A clock minus the driver's, in nanoseconds. error: half of the round trip by which it was measured, a bound."""

    ahead: int
    error: int


def measure(ask: Ask, now: Callable[[], int] = time.time_ns) -> tuple[str, Offset]:
    """(host, its offset) by the fastest of ROUND_TRIPS. Raises as `Ask`."""
    found = []
    for _ in range(ROUND_TRIPS):
        began = now()
        host, there = ask()
        took = now() - began
        found.append((took, there - (began + took // 2), host))
    took, ahead, host = min(found)
    return host, Offset(ahead, (took + 1) // 2)


class NodeClocks:
    """The offsets of the nodes' clocks. here: the driver's host, whose clock is the reference."""

    def __init__(self, here: str, asks: Sequence[Ask] = ()) -> None:
        """asks: one for each other node."""
        self._here, self.asks = here, asks
        self.offsets: Mapping[str, Offset] = {here: Offset(0, 0)}

    def measure(self) -> None:
        """Measures again; a node that does not answer keeps its last offset."""
        found = dict(self.offsets)
        for ask in self.asks:
            try:
                host, offset = measure(ask)
            except RuntimeError:
                continue
            if host != self._here:
                found[host] = offset
        self.offsets = found

    def ahead(self, host: str) -> int:
        """Nanoseconds to take off a time of `host`. 0 for one that is not known."""
        return self.offsets[host].ahead if host in self.offsets else 0
