"""Scored groups waiting to be trained.

A prompt gets a ticket when it is admitted to generation, and groups leave in the order of their tickets. Taking them as
they finish would let short answers overtake long ones and starve these until they are arbitrarily stale; in the order
admitted, a bound on the tickets in flight bounds the staleness too. So `take` waits for the oldest ticket, even when
younger ones are ready.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from miles_like.types import SampleGroup

STALE = "stale"


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """What a buffer holds between two steps. Tickets in flight are not in it: their prompts are issued again."""

    groups: tuple[SampleGroup, ...] = ()  # in the order admitted
    dropped: Mapping[str, int] = field(default_factory=dict)  # reason -> groups, since the run began


class DataBuffer:
    """For one event loop: producers `admit` and `put`, one consumer takes.

    `max_staleness`: weight versions between the oldest token of a group and the weights it is about to train; 0 is
    on-policy.
    """

    def __init__(self, *, max_staleness: int) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness {max_staleness} must be at least 0")
        self._max_staleness = max_staleness
        self._next_ticket = 0
        self._waiting: dict[int, SampleGroup | None] = {}  # by ticket, ascending; None: still in flight
        self._changed = asyncio.Condition()
        self._dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Groups ready to be taken, whether or not an older ticket holds them up."""
        return sum(g is not None for g in self._waiting.values())

    @property
    def in_flight(self) -> int:
        return len(self._waiting) - len(self)

    @property
    def dropped(self) -> Mapping[str, int]:
        """Reason -> groups dropped since the run began."""
        return dict(self._dropped)

    def admit(self) -> int:
        """A ticket for a prompt that is about to be generated."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._waiting[ticket] = None
        return ticket

    async def put(self, ticket: int, group: SampleGroup) -> None:
        """Raises ValueError when the ticket was not admitted or has been used."""
        self._check_in_flight(ticket)
        self._waiting[ticket] = group
        await self._wake()

    async def discard(self, ticket: int, *, reason: str) -> None:
        """Give a ticket up (its generation was aborted, a filter refused the group); counted under `reason`."""
        self._check_in_flight(ticket)
        del self._waiting[ticket]
        self._dropped[reason] += 1
        await self._wake()

    async def take(self, n: int, *, version: int) -> list[SampleGroup]:
        """The n oldest admitted groups, once they are ready, to be trained by weights `version`.

        A group with a token older than `version - max_staleness` is dropped, counted as stale, and does not count
        towards n, so the producer has to admit another prompt for it.
        """
        async with self._changed:
            while True:
                self._drop_stale(version)
                first = list(self._waiting.items())[:n]
                groups = [g for _, g in first if g is not None]
                if len(groups) == n:
                    for ticket, _ in first:
                        del self._waiting[ticket]
                    return groups
                await self._changed.wait()

    def state(self) -> BufferState:
        return BufferState(groups=tuple(g for g in self._waiting.values() if g is not None), dropped=self.dropped)

    def restore(self, state: BufferState) -> None:
        """Start from a saved state. Raises ValueError when this buffer has been used."""
        if self._next_ticket:
            raise ValueError(
                f"cannot restore into a buffer that has admitted {self._next_ticket} prompts: make a new one"
            )
        for group in state.groups:
            self._waiting[self.admit()] = group
        self._dropped = Counter(state.dropped)

    def _check_in_flight(self, ticket: int) -> None:
        if ticket not in self._waiting or self._waiting[ticket] is not None:
            raise ValueError(f"ticket {ticket} is not in flight: {self._next_ticket} were admitted, each is put once")

    def _drop_stale(self, version: int) -> None:
        for ticket, group in list(self._waiting.items()):
            if group is not None and version - group.oldest_version > self._max_staleness:
                del self._waiting[ticket]
                self._dropped[STALE] += 1

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()
