"""Groups between their admission to generation and their training.

A prompt gets a group id when it is admitted, and groups leave in the order of their ids. Groups taken as they finish
would let short answers overtake long ones, whose staleness would then have no bound. In the order of admission a bound
on the outstanding groups bounds the staleness too: with room for G (1 + k) of them, a group admitted under version v is
trained by version v + k at the latest.

With `backfill` a group that is not ready is passed over as long as every outstanding group can still be trained within
the bound, G groups a step: of the groups that must have left by step d, at most G (d - s) may stay behind when step s
takes its groups. (Earliest deadline first; a younger group in an older one's place uses up slack.)

Letters: G groups a step, k max_staleness.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_like.checkpoint.ledger import Ledger
from miles_like.loop.old_tokens import mask_old
from miles_like.loop.rollout_stats import RolloutStats
from miles_like.types import Json, Prompt, SampleGroup

STALE = "stale"
LOST = "its rollout worker ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A group that is about to be trained."""

    group_id: int
    group: SampleGroup
    stats: RolloutStats = field(default_factory=RolloutStats)  # of the sampling since the group before it


@dataclass(slots=True, kw_only=True)
class _Entry:
    prompt: Prompt
    version: int  # of the weights when it was admitted: no token of it is older
    group: SampleGroup | None = None  # None: still in flight
    stats: RolloutStats = field(default_factory=RolloutStats)


class DataBuffer:
    """The groups between admission and training. For one event loop: a producer admits, puts and discards groups, one
    consumer takes them.

    max_staleness: weight versions between the oldest token of a group and the weights that it trains; 0 is on-policy.
    samples: number of samples requested per group. ledger: accounts for every group. backfill: take younger groups in
    place of older ones that are not ready. mask_old_tokens: a group with tokens older than the bound is trained without
    them (old_tokens.mask_old), and discarded if none is left; without it every such group is discarded. release: called
    with groups that are discarded.
    """

    def __init__(
        self,
        *,
        max_staleness: int,
        samples: int = 1,
        ledger: Ledger | None = None,
        backfill: bool = False,
        mask_old_tokens: bool = False,
        release: Callable[[Sequence[SampleGroup]], None] = lambda groups: None,
    ) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness {max_staleness} must be at least 0")
        self.max_staleness = max_staleness
        self._samples = samples
        self._ledger = Ledger(None) if ledger is None else ledger
        self._backfill = backfill
        self._mask_old_tokens = mask_old_tokens
        self._release = release
        self._next_id = 0
        self._waiting: dict[int, _Entry] = {}  # by group id, ascending
        self._training = 0  # groups that were taken, and not trained or their weights not published
        self._changed = asyncio.Condition()
        self.producer_wake = asyncio.Event()  # set when a group is discarded, so that there is room for a prompt
        self._dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        """Groups that are ready, whether or not an older one delays them."""
        return sum(e.group is not None for e in self._waiting.values())

    @property
    def in_flight(self) -> int:
        return len(self._waiting) - len(self)

    @property
    def slack(self) -> int:
        """Largest number of weight versions between a group's admission and its training: max_staleness, or one more
        with `mask_old_tokens`."""
        return self.max_staleness + self._mask_old_tokens

    @property
    def outstanding(self) -> int:
        """Groups that are admitted and not trained or discarded."""
        return len(self._waiting) + self._training

    @property
    def group_ids(self) -> Sequence[int]:
        """Ids of the groups that are in flight or ready, ascending."""
        return tuple(self._waiting)

    @property
    def prompts_in_flight(self) -> Mapping[int, Prompt]:
        """Group id -> prompt of each group in flight."""
        return {t: e.prompt for t, e in self._waiting.items() if e.group is None}

    @property
    def dropped(self) -> Mapping[str, int]:
        """Reason -> groups discarded since the run began."""
        return dict(self._dropped)

    def admit(self, prompt: Prompt, *, version: int) -> int:
        """Admits a prompt that will be sampled by weights `version` or later ones; returns its group id."""
        group_id = self._next_id
        self._next_id += 1
        self._waiting[group_id] = _Entry(prompt=prompt, version=version)
        self._ledger.issue(group_id, prompt.id, self._samples)
        return group_id

    async def put(self, group_id: int, group: SampleGroup, stats: RolloutStats | None = None) -> None:
        """Stores a finished group. Raises RuntimeError when the id is not in flight, or belongs to another prompt."""
        entry = self._in_flight(group_id)
        if group.prompt.id != entry.prompt.id:
            raise RuntimeError(
                f"group {group_id} belongs to prompt {entry.prompt.id!r}, but got samples of prompt {group.prompt.id!r}"
            )
        entry.group, entry.stats = group, stats or RolloutStats()
        await self._wake()

    async def discard(self, group_id: int, *, reason: str, group: SampleGroup | None = None) -> None:
        """Discards a group in flight, which is counted under `reason`. group: its samples, where it has ended."""
        self._in_flight(group_id)
        self._drop(group_id, reason, group)
        await self._wake()

    async def lose(self, is_lost: Callable[[SampleGroup], bool]) -> list[Prompt]:
        """Discards the groups that wait here and are lost; returns their prompts."""
        gone = self.drop_lost([i for i, e in self._waiting.items() if e.group is not None and is_lost(e.group)])
        await self._wake()
        return gone

    def drop_lost(self, group_ids: Sequence[int]) -> list[Prompt]:
        """Discards groups that are lost; returns their prompts."""
        entries = [(group_id, self._waiting[group_id]) for group_id in group_ids]
        for group_id, entry in entries:
            self._drop(group_id, LOST, entry.group)
        return [entry.prompt for _, entry in entries]

    async def give_back(self, taken: Sequence[Taken]) -> None:
        """Groups that were taken and not trained wait again."""
        self._training -= len(taken)
        for t in taken:
            entry = _Entry(prompt=t.group.prompt, version=t.group.oldest_version, group=t.group, stats=t.stats)
            self._waiting[t.group_id] = entry
        self._waiting = dict(sorted(self._waiting.items()))
        await self._wake()

    async def discard_all(self, reason: str) -> None:
        """Discards all groups, ready or in flight."""
        for group_id, entry in list(self._waiting.items()):
            self._drop(group_id, reason, entry.group)
        await self._wake()

    async def take(self, n: int, *, version: int) -> list[Taken]:
        """The n oldest groups, to be trained by weights `version`, as soon as they are ready.

        A group with a token older than `version - max_staleness` is discarded as stale and does not count towards n, so
        the producer admits another prompt for it; with `mask_old_tokens` it may stay without those tokens.
        """
        async with self._changed:
            while True:
                self._age(version)
                if (chosen := self._choice(n, version)) is not None:
                    self._training += n
                    return [self._leave(group_id) for group_id in chosen]
                await self._changed.wait()

    def enough(self, n: int, *, version: int) -> bool:
        """Whether `take` would return at once."""
        self._age(version)
        return self._choice(n, version) is not None

    def trained(self, groups: int) -> None:
        """Call when `groups` of the groups that were taken are trained and the new weights are published."""
        self._training -= groups

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

    def _leave(self, group_id: int) -> Taken:
        entry = self._waiting.pop(group_id)
        assert entry.group is not None, "chosen because it is ready"
        return Taken(group_id=group_id, group=entry.group, stats=entry.stats)

    def _age(self, version: int) -> None:
        for group_id, entry in list(self._waiting.items()):
            if entry.group is None or version - entry.group.oldest_version <= self.max_staleness:
                continue
            left = None
            if self._mask_old_tokens:
                left = mask_old(entry.group, version=version, max_staleness=self.max_staleness)
            if left is None:
                self._drop(group_id, STALE, entry.group)
            else:
                entry.group = left

    def _drop(self, group_id: int, reason: str, group: SampleGroup | None) -> None:
        """group: where it has ended; some of its samples may have been discarded before, for other reasons."""
        del self._waiting[group_id]
        self.producer_wake.set()
        self._dropped[reason] += 1
        if group is not None:
            self._release([group])
        self._ledger.discard(group_id, reason, discarded_samples=None if group is None else group.discarded)

    def _in_flight(self, group_id: int) -> _Entry:
        entry = self._waiting.get(group_id)
        if entry is None or entry.group is not None:
            raise RuntimeError(
                f"group {group_id} is not in flight: it ended before, or is not among the {self._next_id} "
                "admitted groups"
            )
        return entry

    async def _wake(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def state(self) -> tuple[Json, Mapping[str, SampleGroup]]:
        """All outstanding groups as JSON, with the keys of run_state.json; and the ready groups by id."""
        group_ids = [
            {"ticket": t, "prompt": e.prompt.id, "version": e.version, "tally": e.stats.state()}
            for t, e in self._waiting.items()
        ]
        groups = {str(t): e.group for t, e in self._waiting.items() if e.group is not None}
        return {"next_ticket": self._next_id, "tickets": group_ids, "dropped": self.dropped}, groups

    def restore(self, state: Any, groups: Mapping[str, SampleGroup], find: Callable[[str], Prompt]) -> None:
        """Restores a saved state into a new buffer; `find` returns a prompt by its id. Raises ValueError for a buffer
        that was used, and for a damaged state."""
        if self._next_id:
            raise ValueError(
                f"cannot restore into a buffer that has admitted {self._next_id} prompts: create a new buffer"
            )
        group_ids = [t["ticket"] for t in state["tickets"]]
        if len(set(group_ids)) != len(group_ids) or any(not 0 <= t < state["next_ticket"] for t in group_ids):
            raise ValueError(
                f"the buffer's saved state is damaged: its groups {group_ids[:8]} are not distinct ids below "
                f"{state['next_ticket']}: resume from an earlier checkpoint"
            )
        for t in state["tickets"]:
            group = groups.get(str(t["ticket"]))
            prompt = find(t["prompt"]) if group is None else group.prompt
            self._waiting[t["ticket"]] = _Entry(
                prompt=prompt, version=t["version"], group=group, stats=RolloutStats.restored(t["tally"])
            )
        self._next_id = state["next_ticket"]
        self._dropped = Counter(state["dropped"])
