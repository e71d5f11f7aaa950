"""Groups on their way from admission to training.

A prompt gets a ticket when it is admitted to generation, and groups leave in the order of their tickets. Taking them as
they finish would let short answers overtake long ones and starve these until they are arbitrarily stale. In the order
admitted, a bound on the groups under way bounds the staleness too: with room for G (1 + k) of them, a group admitted
under version v is trained by version v + k at the latest.

With `backfill` a group that is not ready is passed over, but only as long as everything under way can still be trained
within the bound, G groups a step: of the tickets that must have left by step d, at most G (d - s) may stay behind when
step s takes its groups. (Earliest deadline first; a younger group in an older one's place uses up slack.)

Letters: G groups a step, k max_staleness.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_like.ledger import Ledger
from miles_like.tally import Tally
from miles_like.types import Json, Prompt, SampleGroup

STALE = "stale"
OldTokens = Callable[..., SampleGroup | None]  # (group, version=, max_staleness=) -> what is left to train


def _unheard() -> None:
    """Nobody admits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A group that is about to be trained."""

    ticket: int
    group: SampleGroup
    tally: Tally = field(default_factory=Tally)  # what was sampled and left out on the way to it


@dataclass(slots=True, kw_only=True)
class _Entry:
    prompt: Prompt
    version: int  # of the weights when it was admitted: no token of it is older
    group: SampleGroup | None = None  # None: still in flight
    tally: Tally = field(default_factory=Tally)


class DataBuffer:
    """For one event loop: a producer admits, puts and discards, one consumer takes.

    max_staleness: weight versions between the oldest token of a group and the weights it is about to train; 0 is
    on-policy. samples: of a group when it is issued. ledger: keeps account of every ticket. old_tokens: what is left of
    a group with tokens older than the bound; None: it is left out.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        samples: int = 1,
        ledger: Ledger | None = None,
        backfill: bool = False,
        old_tokens: OldTokens | None = None,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness {max_staleness} must be at least 0")
        self.max_staleness = max_staleness
        self._samples = samples
        self._ledger = Ledger(None) if ledger is None else ledger
        self._backfill = backfill
        self._old_tokens = old_tokens
        self._next_ticket = 0
        self._waiting: dict[int, _Entry] = {}  # by ticket, ascending
        self._training = 0  # groups taken, of the step that is not over
        self._changed = asyncio.Condition()
        self.made_room: Callable[[], None] = _unheard  # called when a group was left out
        self._dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Groups ready to be taken, whether or not an older ticket holds them up."""
        return sum(e.group is not None for e in self._waiting.values())

    @property
    def in_flight(self) -> int:
        return len(self._waiting) - len(self)

    @property
    def slack(self) -> int:
        """Versions between a group's admission and its training: masked, it may be trained one version later."""
        return self.max_staleness + (self._old_tokens is not None)

    @property
    def under_way(self) -> int:
        """Groups that were admitted and whose step is not over."""
        return len(self._waiting) + self._training

    @property
    def tickets(self) -> Sequence[int]:
        """In flight or ready."""
        return tuple(self._waiting)

    @property
    def prompts_in_flight(self) -> Mapping[int, Prompt]:
        """By ticket."""
        return {t: e.prompt for t, e in self._waiting.items() if e.group is None}

    @property
    def dropped(self) -> Mapping[str, int]:
        """Reason -> groups dropped since the run began."""
        return dict(self._dropped)

    def admit(self, prompt: Prompt, *, version: int) -> int:
        """A ticket for a prompt that is about to be generated, by weights `version` or later ones."""
        ticket = self._next_ticket
        self._next_ticket += 1
        self._waiting[ticket] = _Entry(prompt=prompt, version=version)
        self._ledger.issue(ticket, prompt.id, self._samples)
        return ticket

    async def put(self, ticket: int, group: SampleGroup, tally: Tally | None = None) -> None:
        """Raises RuntimeError when the ticket is not in flight, or is another prompt's."""
        entry = self._in_flight(ticket)
        if group.prompt.id != entry.prompt.id:
            raise RuntimeError(f"ticket {ticket} is of prompt {entry.prompt.id!r}, the group of {group.prompt.id!r}")
        entry.group, entry.tally = group, tally or Tally()
        await self._wake()

    async def discard(self, ticket: int, *, reason: str, group: SampleGroup | None = None) -> None:
        """Give a ticket up (a filter refused the group, it was more than the step needs); counted under `reason`."""
        self._in_flight(ticket)
        self._drop(ticket, reason, group)
        await self._wake()

    async def discard_all(self, reason: str) -> None:
        """Give everything up, ready or not."""
        for ticket, entry in list(self._waiting.items()):
            self._drop(ticket, reason, entry.group)
        await self._wake()

    async def take(self, n: int, *, version: int) -> list[Taken]:
        """n groups, oldest tickets first, to be trained by weights `version`, as soon as they are ready.

        A group with a token older than `version - max_staleness` is left out, counted as stale, and does not count
        towards n, so the producer has to admit another prompt for it; with `old_tokens` it stays without them.
        """
        async with self._changed:
            while True:
                self._age(version)
                if (chosen := self._choice(n, version)) is not None:
                    self._training += n
                    return [self._leave(ticket) for ticket in chosen]
                await self._changed.wait()

    def enough(self, n: int, *, version: int) -> bool:
        """Whether `take` need not wait."""
        self._age(version)
        return self._choice(n, version) is not None

    def trained(self) -> None:
        """The step of the groups that were taken is over, and its weights are published."""
        self._training = 0

    def _choice(self, n: int, version: int) -> list[int] | None:
        if not self._backfill:
            first = list(self._waiting.items())[:n]
            return [t for t, _ in first] if len(first) == n and all(e.group for _, e in first) else None
        chosen = [t for t, e in self._waiting.items() if e.group is not None][:n]
        if len(chosen) < n:
            return None
        behind, left = 0, Counter(e.version for t, e in self._waiting.items() if t not in set(chosen))
        for admitted in sorted(left):
            behind += left[admitted]
            if behind > n * max(admitted + self.slack - version, 0):
                return None
        return chosen

    def _leave(self, ticket: int) -> Taken:
        entry = self._waiting.pop(ticket)
        assert entry.group is not None, "chosen because it is ready"
        return Taken(ticket=ticket, group=entry.group, tally=entry.tally)

    def _age(self, version: int) -> None:
        for ticket, entry in list(self._waiting.items()):
            if entry.group is None or version - entry.group.oldest_version <= self.max_staleness:
                continue
            left = None
            if self._old_tokens is not None:
                left = self._old_tokens(entry.group, version=version, max_staleness=self.max_staleness)
            if left is None:
                self._drop(ticket, STALE, entry.group)
            else:
                entry.group = left

    def _drop(self, ticket: int, reason: str, group: SampleGroup | None) -> None:
        """`group`: where it has ended; some of its samples were given up before, for reasons of their own."""
        del self._waiting[ticket]
        self.made_room()
        self._dropped[reason] += 1
        self._ledger.discard(ticket, reason, given_up=None if group is None else group.discarded)

    def _in_flight(self, ticket: int) -> _Entry:
        entry = self._waiting.get(ticket)
        if entry is None or entry.group is not None:
            raise RuntimeError(f"ticket {ticket} is not in flight: {self._next_ticket} were admitted, each ends once")
        return entry

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def state(self) -> tuple[Json, Mapping[str, SampleGroup]]:
        """What is under way, as JSON, and the groups that are ready, by ticket."""
        tickets = [
            {"ticket": t, "prompt": e.prompt.id, "version": e.version, "tally": e.tally.state()}
            for t, e in self._waiting.items()
        ]
        groups = {str(t): e.group for t, e in self._waiting.items() if e.group is not None}
        return {"next_ticket": self._next_ticket, "tickets": tickets, "dropped": self.dropped}, groups

    def restore(self, state: Any, groups: Mapping[str, SampleGroup], find: Callable[[str], Prompt]) -> None:
        """Go on from a saved state; prompts in flight are found by their ids. Raises ValueError when it was used."""
        if self._next_ticket:
            raise ValueError(
                f"cannot restore into a buffer that has admitted {self._next_ticket} prompts: make a new one"
            )
        tickets = [t["ticket"] for t in state["tickets"]]
        if len(set(tickets)) != len(tickets) or any(not 0 <= t < state["next_ticket"] for t in tickets):
            raise ValueError(
                f"the buffer's saved state is damaged: tickets {tickets[:8]} of {state['next_ticket']}, each once: "
                "resume from an earlier checkpoint"
            )
        for t in state["tickets"]:
            group = groups.get(str(t["ticket"]))
            prompt = find(t["prompt"]) if group is None else group.prompt
            self._waiting[t["ticket"]] = _Entry(
                prompt=prompt, version=t["version"], group=group, tally=Tally.restored(t["tally"])
            )
        self._next_ticket = state["next_ticket"]
        self._dropped = Counter(state["dropped"])
