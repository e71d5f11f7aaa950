"""The buffer between sampling and training, with the rules of miles_like/loop/buffer.py.

tests/miles_like/simulation/test_rules.py runs both on the same events.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from miles_like.simulation.loop.ledger import SimLedger
from miles_like.simulation.servers.samples import SimGroup

STALE = "stale"


@dataclass(slots=True, eq=False)
class SimEntry:
    group: SimGroup
    version: int  # of the weights when it was admitted
    ready: bool = False
    oldest: int = 0  # version that sampled a token which is trained; of a ready group


@dataclass(kw_only=True)
class SimBuffer:
    """max_staleness, backfill, mask_old_tokens: as of DataBuffer. entries: by group id, ascending."""

    max_staleness: int
    backfill: bool
    mask_old_tokens: bool
    ledger: SimLedger
    entries: dict[int, SimEntry] = field(default_factory=dict)
    training: int = 0  # groups taken by the current step
    wake: asyncio.Event = field(default_factory=asyncio.Event)  # a group was discarded: there is room for a prompt
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def slack(self) -> int:
        return self.max_staleness + self.mask_old_tokens

    @property
    def outstanding(self) -> int:
        return len(self.entries) + self.training

    def admit(self, group: SimGroup, *, version: int) -> None:
        self.entries[group.group_id] = SimEntry(group, version)

    def put(self, group_id: int) -> None:
        entry = self.entries[group_id]
        entry.ready, entry.oldest = True, entry.group.oldest_version
        self._changed.set()

    def discard(self, group_id: int, reason: str) -> None:
        del self.entries[group_id]
        self.ledger.discard(group_id, reason)
        self.wake.set()
        self._changed.set()

    async def take(self, n: int, *, version: int) -> list[SimGroup]:
        """The n oldest groups, to be trained by weights `version`, as soon as they are ready."""
        while True:
            self._age(version)
            if (chosen := self._choice(n, version)) is not None:
                self.training += n
                return [self.entries.pop(group_id).group for group_id in chosen]
            self._changed.clear()
            await self._changed.wait()

    def trained(self) -> None:
        self.training = 0

    def _choice(self, n: int, version: int) -> list[int] | None:
        if not self.backfill:
            first = list(self.entries.items())[:n]
            return [i for i, _ in first] if len(first) == n and all(e.ready for _, e in first) else None
        chosen = [i for i, e in self.entries.items() if e.ready][:n]
        if len(chosen) < n:
            return None
        taken, behind = set(chosen), 0
        left = Counter(e.version for i, e in self.entries.items() if i not in taken)
        for admitted in sorted(left):
            behind += left[admitted]
            if behind > n * max(admitted + self.slack - version, 0):
                return None
        return chosen

    def _age(self, version: int) -> None:
        oldest = version - self.max_staleness
        for group_id, entry in list(self.entries.items()):
            if not entry.ready or entry.oldest >= oldest:
                continue
            entry.group.mask = oldest
            entry.oldest = entry.group.oldest_version
            if not self.mask_old_tokens or not entry.group.spans():
                self.discard(group_id, STALE)
