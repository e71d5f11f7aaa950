"""Keeps groups under way: deals prompts, has them sampled and scored, and puts what is worth training into the buffer.

Prompts are sampled in waves. Who may be admitted when:

in steps  (max_staleness = 0 without old_tokens, and lockstep) one wave at a time, for one training step after the
          other, at most max_staleness steps ahead of the weights. A wave's groups are decided in the order of their
          tickets. What is left out is replaced by a further wave, as large as is likely to fill the step; what is more
          than the step needs is discarded. With lockstep a publication waits until no more may be admitted and nothing
          is in flight (`settled`), so which weights sample a prompt follows from its ticket.
freely    whenever fewer than `room` groups are under way, from admission until they are trained and published.

Dynamic sampling (DAPO, arXiv:2503.14476, 3.2) is a filter that leaves out groups whose rewards are all equal. A group
none of whose samples could be scored is left out by every run.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles_like.buffer import DataBuffer
from miles_like.tally import Tally
from miles_like.types import Json, Prompt, SampleGroup

UNSCORED = "no sample was scored"
SURPLUS = "more than the step needs"

# (wave, prompts) -> sampled and scored groups as they end, each with its prompt's place
Rollout = Callable[[int, Sequence[Prompt]], AsyncGenerator[tuple[int, SampleGroup], None]]


async def _nothing() -> None:
    """There is nobody to tell."""


@dataclass(slots=True, kw_only=True)
class _Wave:
    number: int  # sampling seeds are made of it
    tickets: dict[int, Prompt]  # not yet decided


@dataclass(kw_only=True)
class Producer:
    """For one event loop: `run` beside the loop that takes from the buffer.

    over_sampling: share of a step's groups that is admitted beyond them. early_abort: a step's remaining prompts are
    given up when it is full, and `abort` tells the servers. lockstep: see the module.
    """

    groups: int  # a step
    buffer: DataBuffer
    next_prompts: Callable[[int], Sequence[Prompt]]  # so many, or fewer when the source ends
    rollout: Rollout
    lockstep: bool = False
    over_sampling: float | None = None
    refuse: Callable[[SampleGroup], str | None] = lambda group: None  # the reason to leave a group out
    shape: Callable[[SampleGroup], SampleGroup] = lambda group: group  # other rewards for what was not left out
    abort: Callable[[], Awaitable[None]] = _nothing
    steps: int = 1 << 62  # of the run: nothing is sampled that no step would train
    max_rounds: int = 1  # prompts sampled for one step, as a multiple of `groups`
    version: int = 0  # published last
    ended: bool = False  # the source has no more prompts

    _step: int = 0  # that is being filled; counts from the run's first
    _kept: int = 0  # groups for it
    _tried: int = 0  # groups sampled for it
    _left_out: Counter[str] = field(default_factory=Counter)  # of these
    _number: int = 0  # of the next wave
    _held: list[Prompt] = field(default_factory=list)  # dealt, for the next wave
    _waves: dict[int, _Wave] = field(default_factory=dict)
    _tally: Tally = field(default_factory=Tally)  # since the last group that was kept
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _decided: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.buffer.made_room = self._changed.set

    @property
    def in_steps(self) -> bool:
        return self.lockstep or self.buffer.slack == 0

    @property
    def early_abort(self) -> bool:
        return bool(self.over_sampling) and self.in_steps and not self.lockstep

    @property
    def room(self) -> int:
        """Groups under way at most, where prompts are admitted freely."""
        share = self.buffer.max_staleness if self.over_sampling is None else self.over_sampling
        return math.ceil(self.groups * (1 + share))

    @property
    def settled(self) -> bool:
        """Nothing is in flight, and nothing will be before the next publication."""
        return not self._waves and (self.ended or not self._may_admit())

    async def run(self) -> None:
        """Until the source ends. Raises RuntimeError when prompts for a step come to an end without filling it: to
        train on fewer would be another run."""
        running: set[asyncio.Task[None]] = set()
        restored = list(self._waves.values())  # in flight when the run was saved
        try:
            while True:
                self._changed.clear()
                for task in [t for t in running if t.done()]:
                    running.remove(task)
                    task.result()
                waves = restored or self._admitted()
                restored = []
                for wave in waves:
                    running.add(task := asyncio.create_task(self._sampled(wave)))
                    task.add_done_callback(lambda _: self._changed.set())
                if self.ended and not running:
                    return
                await self._changed.wait()
        finally:
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def published(self, version: int) -> None:
        """The groups that were taken are trained, and the servers have these weights."""
        self.buffer.trained()
        self.version = version
        self._changed.set()

    async def settle(self) -> None:
        """Until `settled`."""
        while not self.settled:
            self._decided.clear()
            await self._decided.wait()

    def _admitted(self) -> list[_Wave]:
        """The next waves, as long as there is room for one."""
        waves = []
        while (n := self._may_admit()) and (wave := self._admit(n)) is not None:
            waves.append(wave)
        return waves

    def _admit(self, n: int) -> _Wave | None:
        """Up to n prompts; None: there are no more."""
        prompts = self._dealt(n)
        if not prompts:
            self._decided.set()
            return None
        tickets = {self.buffer.admit(p, version=self.version): p for p in prompts}
        wave = self._waves[self._number] = _Wave(number=self._number, tickets=tickets)
        self._number += 1
        self._tally.waves += 1
        return wave

    def _dealt(self, n: int) -> list[Prompt]:
        """The next prompts, up to n or to where one comes again: seeds are made of wave and prompt, so in one wave it
        would be answered twice alike."""
        there = [*self._held, *self.next_prompts(max(n - len(self._held), 0))]
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
        """Prompts that may be sampled now."""
        if self.ended:
            return 0
        if not self.in_steps:
            left = (self.steps - self.version) * self.groups
            return max(min(self.room, left) - self.buffer.under_way, 0)
        if self._waves or self._step >= min(self.version + self.buffer.max_staleness + 1, self.steps):
            return 0
        if not self._tried:
            return math.ceil(self.groups * (1 + (self.over_sampling or 0)))
        missing = self.groups - self._kept
        return min(math.ceil(missing * self._tried / max(self._kept, 1)), self.groups)  # if they are like those sampled

    async def _sampled(self, wave: _Wave) -> None:
        since, tickets = time.perf_counter(), list(wave.tickets)

        def timed() -> None:
            nonlocal since
            since, began = time.perf_counter(), since
            if self.in_steps:
                self._tally.seconds += since - began

        done: dict[int, SampleGroup] = {}
        async with contextlib.aclosing(self.rollout(wave.number, list(wave.tickets.values()))) as groups:
            async for place, group in groups:
                if self.in_steps and not self.early_abort:
                    done[tickets[place]] = group
                    continue
                timed()  # it is of the step that the group may fill
                await self._decide(wave, {tickets[place]: group})
                if self.early_abort and self._kept == self.groups:
                    break
        if not self.early_abort:
            timed()
        await self._decide(wave, dict(sorted(done.items())))
        if wave.tickets:
            await self.abort()
            for ticket in list(wave.tickets):
                await self.buffer.discard(ticket, reason=SURPLUS)
        del self._waves[wave.number]
        self._next_step()
        self._decided.set()

    async def _decide(self, wave: _Wave, ended: Mapping[int, SampleGroup]) -> None:
        """What becomes of groups that have ended, in their order."""
        refused = {t: self.refuse(g) if g.samples else _why_empty(g) for t, g in ended.items()}
        for ticket, group in ended.items():
            self._tally.count(group, refused[ticket])
            self._tried += 1
        for ticket, group in ended.items():
            reason = refused[ticket]
            if reason is not None:
                self._left_out[reason] += 1
            elif self.in_steps and self._kept == self.groups:
                reason = SURPLUS
            if reason is not None:
                await self.buffer.discard(ticket, reason=reason, group=group)
            else:
                self._kept += 1
                tally, self._tally = self._tally, Tally()
                await self.buffer.put(ticket, self.shape(group), tally)
            del wave.tickets[ticket]
        if not self.in_steps:
            self._next_step()

    def _next_step(self) -> None:
        if self._kept >= self.groups:
            self._step += 1
            self._kept -= self.groups
            self._tried = 0
            self._left_out.clear()
        elif self._tried >= self.max_rounds * self.groups and not self.ended:  # else it is the prompts' end
            why = ", ".join(f"{n} {reason}" for reason, n in self._left_out.most_common())
            raise RuntimeError(
                f"step {self._step}: {self._kept} of {self.groups} groups of {self._tried} prompts, "
                f"{self._left_out.total()} were left out ({why}): raise rollout.max_rounds = {self.max_rounds}, or "
                "change the filter or the prompts"
            )

    def state(self) -> Json:
        """At the boundary of a step."""
        return {
            "step": self._step,
            "kept": self._kept,
            "tried": self._tried,
            "left_out": dict(self._left_out),
            "number": self._number,
            "held": [p.id for p in self._held],
            "tally": self._tally.state(),
            "waves": [{"number": w.number, "tickets": list(w.tickets)} for w in self._waves.values()],
        }

    def restore(self, state: Any, *, version: int, find: Callable[[str], Prompt]) -> None:
        """Into a new producer, after its buffer; what was in flight is sampled again, with the seeds that it had.
        find: a prompt by its id."""
        self._held = [find(i) for i in state["held"]]
        self._step, self._kept, self._tried = state["step"], state["kept"], state["tried"]
        self._left_out, self._number = Counter(state["left_out"]), state["number"]
        self._tally, self.version = Tally.restored(state["tally"]), version
        prompts = self.buffer.prompts_in_flight
        for w in state["waves"]:
            tickets = {t: prompts[t] for t in w["tickets"] if t in prompts}
            if tickets:
                self._waves[w["number"]] = _Wave(number=w["number"], tickets=tickets)


def _why_empty(group: SampleGroup) -> str:
    """With what most of its samples were given up for: of a server that is gone, this is where the run ends."""
    most = max(group.discarded, key=group.discarded.__getitem__, default=None)
    return UNSCORED if most is None else f"{UNSCORED}: {most}"
