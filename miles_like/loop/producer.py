"""Samples and scores groups in the background, and puts those worth training into the buffer.

Prompts are sampled in rounds, which are admitted

in steps  (max_staleness = 0 without mask_old_tokens, and lockstep) one round at a time, for one training step after the
          other, at most max_staleness steps ahead of the weights. The groups of a round are accepted or discarded in
          the order of their ids. Discarded ones are replaced by a further round, as large as is likely to fill the
          step; groups beyond the step's need are discarded. With lockstep a publication waits until no more may be
          admitted and nothing is in flight (`drained`), so the weights that sample a prompt follow from its group id.
freely    whenever fewer than `room` groups are outstanding, from admission until they are trained and published.

Dynamic sampling (DAPO, arXiv:2503.14476, 3.2) is a filter that discards groups whose rewards are all equal. A group
without a scored sample is always discarded.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_like.algorithms.truncation import OverlongShaping
from miles_like.loop.buffer import LOST, DataBuffer
from miles_like.loop.rollout_stats import RolloutStats
from miles_like.protocols import GroupFilter
from miles_like.records import RecordGroup
from miles_like.types import Json, Prompt, SampleGroup

UNSCORED = "no sample was scored"
OVERSAMPLED = "more than the step needs"


class PromptStream(Protocol):
    """The prompts of a run in the order of their sampling (rollout.prompts.mix.PromptSource)."""

    def take(self, n: int) -> Sequence[Prompt]:
        """The next n prompts; fewer when the source ends."""


class GroupSampler(Protocol):
    """Samples and scores the prompts of a round (run.setup.sampler.EngineSampler)."""

    def groups(self, round_index: int, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        """Yields (index of the prompt, its scored group) when the group is complete."""

    async def abort(self) -> None:
        """Ends all requests that are in flight on the servers."""


class Capacity(Protocol):
    """What holds the samples (cluster.workers.pool.RolloutWorkers)."""

    @property
    def full(self) -> bool:
        """Whether no further ones should be made before a step is trained."""


@dataclass(slots=True, kw_only=True)
class _Round:
    number: int  # part of the sampling seeds
    group_ids: dict[int, Prompt]  # not yet decided
    ended: int = 0  # of these, groups that are scored


@dataclass(kw_only=True)
class Producer:
    """For one event loop: runs concurrently with the loop that takes groups from the buffer.

    over_sampling: groups admitted beyond a step's groups, as a share of these. early_abort: when a step is full, its
    remaining prompts are discarded and `sampler.abort` ends their requests on the servers. lockstep: see the module.
    """

    groups: int  # a step
    buffer: DataBuffer
    source: PromptStream
    sampler: GroupSampler
    filter: GroupFilter | None = None  # discards groups; None: every group with a scored sample is trained
    overlong: OverlongShaping | None = None  # reduces rewards of the groups that are kept; None: rewards stay
    lockstep: bool = False
    over_sampling: float | None = None
    capacity: Capacity | None = None  # None: of the samples held there is no bound
    steps: int = 1 << 62  # of the run: no prompt is sampled that no step would train
    max_rounds: int = 1  # prompts sampled for one step, as a multiple of `groups`
    version: int = 0  # published last
    ended: bool = False  # the source has no more prompts

    _step: int = 0  # the step that is being filled, from 0
    _kept: int = 0  # groups kept for `_step`
    _tried: int = 0  # groups sampled for `_step`
    _refused: Counter[str] = field(default_factory=Counter)  # reason -> discarded groups of `_tried`
    _number: int = 0  # number of the next round
    _held: list[Prompt] = field(default_factory=list)  # prompts taken from the source for the next round
    _rounds: dict[int, _Round] = field(default_factory=dict)
    _stats: RolloutStats = field(default_factory=RolloutStats)  # since the last group that was kept
    _decided: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def in_steps(self) -> bool:
        return self.lockstep or self.buffer.slack == 0

    @property
    def early_abort(self) -> bool:
        return bool(self.over_sampling) and self.in_steps and not self.lockstep

    @property
    def room(self) -> int:
        """Bound on outstanding groups, where prompts are admitted freely."""
        share = self.buffer.max_staleness if self.over_sampling is None else self.over_sampling
        return math.ceil(self.groups * (1 + share))

    @property
    def complete(self) -> int:
        """Groups that are scored and wait for a step, or for the end of their round."""
        return len(self.buffer) + sum(r.ended for r in self._rounds.values())

    @property
    def drained(self) -> bool:
        """Whether no group is in flight and none will be before the next publication."""
        return not self._rounds and (self.ended or not self._may_admit())

    async def run(self) -> None:
        """Runs until the prompts end. Raises RuntimeError where `max_rounds` * `groups` sampled prompts do not fill a
        step: training on fewer groups would give another result."""
        running: set[asyncio.Task[None]] = set()
        restored = list(self._rounds.values())  # in flight when the run was saved
        try:
            while True:
                self.buffer.producer_wake.clear()
                for task in [t for t in running if t.done()]:
                    running.remove(task)
                    task.result()
                rounds = restored or self._admitted()
                restored = []
                for round_ in rounds:
                    running.add(task := asyncio.create_task(self._sampled(round_)))
                    task.add_done_callback(lambda _: self.buffer.producer_wake.set())
                if self.ended and not running:
                    return
                await self.buffer.producer_wake.wait()
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def published(self, version: int) -> None:
        """Weights `version` are on the servers: the groups of a step are trained."""
        self.buffer.trained(self.groups)
        self.version = version
        self.buffer.producer_wake.set()

    def lost(self, prompts: Sequence[Prompt]) -> None:
        """Call when the kept groups of `prompts` are lost, and discarded: others are sampled in their place."""
        kept = self._step * self.groups + self._kept - len(prompts)
        self._step, self._kept = divmod(kept, self.groups) if self.in_steps else (self._step, self._kept)
        self._tried = max(self._tried, self._kept, 1)
        self._sample_again(prompts)
        self.buffer.producer_wake.set()

    def _sample_again(self, prompts: Sequence[Prompt]) -> None:
        """The next rounds begin with these prompts."""
        self._held = [*prompts, *self._held]
        self.ended = False

    async def drain(self) -> None:
        """Waits until `drained`."""
        while not self.drained:
            self._decided.clear()
            await self._decided.wait()

    def _admitted(self) -> list[_Round]:
        """The next rounds, as long as there is room for one."""
        rounds = []
        while (n := self._may_admit()) and (round_ := self._admit(n)) is not None:
            rounds.append(round_)
        return rounds

    def _admit(self, n: int) -> _Round | None:
        """A round of up to n prompts; None: there are no more."""
        prompts = self._next_prompts(n)
        if not prompts:
            self._decided.set()
            return None
        group_ids = {self.buffer.admit(p, version=self.version): p for p in prompts}
        round_ = self._rounds[self._number] = _Round(number=self._number, group_ids=group_ids)
        self._number += 1
        self._stats.rounds += 1
        return round_

    def _next_prompts(self, n: int) -> list[Prompt]:
        """The next prompts, up to n or until one repeats: a seed is made of round and prompt, so twice in one round it
        would get the same answers."""
        there = [*self._held, *self.source.take(max(n - len(self._held), 0))]
        prompts, ids = list[Prompt](), set[str]()
        for prompt in there[:n]:
            if prompt.id in ids:
                break
            prompts.append(prompt)
            ids.add(prompt.id)
        self._held = there[len(prompts) :]
        self.ended = len(prompts) < n and not self._held
        return prompts

    def _may_admit(self) -> int:
        """How many prompts may be sampled now."""
        if self.ended:
            return 0
        if (
            self.capacity is not None
            and self.capacity.full
            and self.buffer.outstanding >= self.groups
            and not self.lockstep
        ):
            return 0  # the groups of the next step are there or in flight: training them makes room
        if not self.in_steps:
            left = (self.steps - self.version) * self.groups
            return max(min(self.room, left) - self.buffer.outstanding, 0)
        if self._rounds or self._step >= min(self.version + self.buffer.max_staleness + 1, self.steps):
            return 0
        if not self._tried:
            return math.ceil(self.groups * (1 + (self.over_sampling or 0)))
        missing = self.groups - self._kept
        return min(math.ceil(missing * self._tried / max(self._kept, 1)), self.groups)  # at the acceptance rate so far

    async def _sampled(self, round_: _Round) -> None:
        since, group_ids = time.perf_counter(), list(round_.group_ids)

        def timed() -> None:
            nonlocal since
            since, began = time.perf_counter(), since
            if self.in_steps:
                self._stats.seconds += since - began

        done: dict[int, SampleGroup] = {}
        async with contextlib.aclosing(self.sampler.groups(round_.number, list(round_.group_ids.values()))) as groups:
            async for place, group in groups:
                if self.in_steps and not self.early_abort:
                    done[group_ids[place]] = group
                    round_.ended = len(done)
                    continue
                timed()  # belongs to the step that the group may fill
                await self._decide(round_, {group_ids[place]: group})
                if self.early_abort and self._kept == self.groups:
                    break
        if not self.early_abort:
            timed()
        round_.ended = 0
        await self._decide(round_, dict(sorted(done.items())))
        if round_.group_ids:
            await self.sampler.abort()
            for group_id in list(round_.group_ids):
                await self.buffer.discard(group_id, reason=OVERSAMPLED)
        del self._rounds[round_.number]
        self._next_step()
        self._decided.set()

    async def _decide(self, round_: _Round, ended: Mapping[int, SampleGroup]) -> None:
        """Keeps or discards groups that have ended, in their order."""
        refused = {t: self._why_discarded(g) for t, g in ended.items()}
        for group_id, group in ended.items():
            if refused[group_id] != LOST:  # which is no sign of prompts that are too hard
                self._stats.count(group, refused[group_id])
                self._tried += 1
        for group_id, group in ended.items():
            reason = refused[group_id]
            if reason is not None:
                self._refused[reason] += reason != LOST
            elif self.in_steps and self._kept == self.groups:
                reason = OVERSAMPLED
            if reason == LOST:
                self._sample_again([group.prompt])
            if reason is not None:
                await self.buffer.discard(group_id, reason=reason, group=group)
            else:
                self._kept += 1
                stats, self._stats = self._stats, RolloutStats()
                kept = group if self.overlong is None else self.overlong.shape(group)
                await self.buffer.put(group_id, kept, stats)
            del round_.group_ids[group_id]
        if not self.in_steps:
            self._next_step()

    def _why_discarded(self, group: SampleGroup) -> str | None:
        """None: the group is worth training."""
        if isinstance(group, RecordGroup) and group.refused is not None:  # by the filter, where the samples are
            return group.refused
        if not group.samples:
            return _why_empty(group)
        return None if self.filter is None or isinstance(group, RecordGroup) else self.filter(group)

    def _next_step(self) -> None:
        if self._kept >= self.groups:
            self._step += 1
            self._kept -= self.groups
            self._tried = 0
            self._refused.clear()
        elif self._tried >= self.max_rounds * self.groups and not self.ended:  # else the prompts have ended
            why = ", ".join(f"{n} {reason}" for reason, n in self._refused.most_common())
            raise RuntimeError(
                f"step {self._step}: only {self._kept} of {self.groups} groups were kept after {self._tried} "
                f"prompts, and {self._refused.total()} groups were discarded ({why}): raise rollout.max_rounds "
                f"above {self.max_rounds}, or change the filter or the prompts"
            )

    def state(self) -> Json:
        """The state at the boundary of two steps, with the keys of run_state.json."""
        return {
            "step": self._step,
            "kept": self._kept,
            "tried": self._tried,
            "left_out": dict(self._refused),
            "number": self._number,
            "held": [p.id for p in self._held],
            "tally": self._stats.state(),
            "waves": [{"number": w.number, "tickets": list(w.group_ids)} for w in self._rounds.values()],
        }

    def restore(self, state: Any, *, version: int, find: Callable[[str], Prompt]) -> None:
        """Restores a new producer, after its buffer. Prompts that were in flight are sampled again with the same seeds.
        find: a prompt by its id."""
        self._held = [find(i) for i in state["held"]]
        self._step, self._kept, self._tried = state["step"], state["kept"], state["tried"]
        self._refused, self._number = Counter(state["left_out"]), state["number"]
        self._stats, self.version = RolloutStats.restored(state["tally"]), version
        prompts = self.buffer.prompts_in_flight
        for w in state["waves"]:
            group_ids = {t: prompts[t] for t in w["tickets"] if t in prompts}
            if group_ids:
                self._rounds[w["number"]] = _Round(number=w["number"], group_ids=group_ids)
        sampled = {t for round_ in self._rounds.values() for t in round_.group_ids}
        # those that were complete in a worker which ended before it saved them
        if lost := self.buffer.drop_lost([t for t in prompts if t not in sampled]):
            self.lost(lost)


def _why_empty(group: SampleGroup) -> str:
    """With the reason of most of its discarded samples: where a server is gone, the run ends with this text."""
    most = max(group.discarded, key=group.discarded.__getitem__, default=None)
    return UNSCORED if most is None else f"{UNSCORED}: {most}"
