"""Law: no token trains weights more than max_staleness versions newer than those that sampled it, whichever part is
slow.

With room for G (1 + k) groups from admission to publication, the oldest ticket first bounds the staleness by k: all
that was admitted under version v fits into steps v .. v + k. Passing over a group that is not ready keeps the bound as
long as what stays behind still fits. Nothing is left out for being stale, no step waits for ever, every sample is
trained once or discarded once.

An adversary decides what ends next (any group in flight, or the step that trains), how far each group gets before
publications reach it, which groups a filter refuses. Not covered: real servers (test_partial_rollouts.py), and that
publications reach what is under way in order (the publisher's to keep).

Letters: G groups a step, k max_staleness.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.checkpoint.ledger import Ledger
from miles_like.loop.buffer import DataBuffer
from miles_like.loop.producer import OVERSAMPLED, Producer
from miles_like.types import Prompt, SampleGroup
from tests.support.made_samples import rewarded

STEPS = 12
TRAINER = "the step that trains"


class Adversary:
    """Each task waits until it is chosen."""

    def __init__(self, seed: int, *, refused: float, lazy_trainer: float) -> None:
        self.random = random.Random(seed)
        self.refused, self.lazy_trainer = refused, lazy_trainer
        self.waiting: dict[str, asyncio.Future[None]] = {}
        self.grudge = self.random.random()  # how strongly old tickets are held back

    async def chooses(self, waiter: str) -> None:
        self.waiting[waiter] = asyncio.get_running_loop().create_future()
        await self.waiting[waiter]

    async def reigns(self) -> None:
        while True:
            for _ in range(12):
                await asyncio.sleep(0)  # until all tasks wait
            names = sorted(self.waiting, key=lambda w: (len(w), w))
            if not names:
                continue
            rollouts = [n for n in names if n != TRAINER]
            if TRAINER in names and (not rollouts or self.random.random() > self.lazy_trainer):
                name = TRAINER
            else:
                young = self.random.random() < self.grudge
                name = rollouts[-1] if young else self.random.choice(rollouts)
            self.waiting.pop(name).set_result(None)


class Loop:
    def __init__(self, adversary: Adversary, groups: int, k: int, **how: Any) -> None:
        self.adversary, self.k, self.version, self.prompts = adversary, k, 0, 0
        self.ledger = Ledger(None)
        self.max_under_way = 0
        self.trained: list[tuple[int, int, int]] = []  # (step, ticket, oldest version)
        backfill = k > 0 and not how.get("lockstep")
        self.buffer = DataBuffer(max_staleness=k, ledger=self.ledger, samples=2, backfill=backfill)
        self.producer = Producer(
            groups=groups,
            buffer=self.buffer,
            source=self,
            sampler=self,
            filter=lambda group: "refused" if adversary.random.random() < adversary.refused else None,
            max_rounds=1000,
            **how,
        )

    def take(self, n: int) -> list[Prompt]:
        self.prompts += n
        return [Prompt(id=str(i), token_ids=(1,), answer="") for i in range(self.prompts - n, self.prompts)]

    async def groups(self, wave: int, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[int, SampleGroup], None]:
        began = self.version
        left = {str(p.id): i for i, p in enumerate(prompts)}
        tasks = {asyncio.create_task(self.adversary.chooses(p)): p for p in left}
        try:
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for t in done:
                    name = tasks.pop(t)
                    yield left[name], rewarded([0, 1], prompt_id=name, version=began)
        finally:
            for t, name in tasks.items():
                t.cancel()
                self.adversary.waiting.pop(name, None)

    async def abort(self) -> None:
        """Requests end when their task is cancelled."""

    async def run(self) -> None:
        running = asyncio.create_task(self.producer.run())
        reign = asyncio.create_task(self.adversary.reigns())
        for step in range(STEPS):
            taken = await asyncio.wait_for(self.buffer.take(self.producer.groups, version=step), 20)
            self.trained += [(step, t.group_id, t.group.oldest_version) for t in taken]
            await self.adversary.chooses(TRAINER)
            if self.producer.lockstep:
                await asyncio.wait_for(self.producer.drain(), 20)
            self.version = step + 1
            for t in taken:
                self.ledger.train(step + 1, t.group_id, t.group)
            self.ledger.check(self.buffer.group_ids)
            self.ledger.flush(step + 1)
            self.producer.published(step + 1)
        for task in (running, reign):
            task.cancel()
        await asyncio.wait({running, reign})


def looped(seed: int, groups: int, k: int, *, refused: float, lazy_trainer: float, **how: Any) -> Loop:
    async def run() -> Loop:
        loop = Loop(Adversary(seed, refused=refused, lazy_trainer=lazy_trainer), groups, k, **how)
        await loop.run()
        return loop

    return asyncio.run(run())


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    groups=st.integers(1, 4),
    k=st.integers(0, 4),
    refused=st.sampled_from([0.0, 0.2, 0.6]),
    lazy_trainer=st.sampled_from([0.0, 0.5, 0.9]),
    share=st.none() | st.floats(0, 1),
    lockstep=st.booleans(),
)
def test_no_token_is_staler_than_the_bound(
    seed: int, groups: int, k: int, refused: float, lazy_trainer: float, share: float | None, lockstep: bool
) -> None:
    over = None if share is None or (lockstep and k) else share * max(k, 1)
    how: dict[str, Any] = {"lockstep": lockstep, "over_sampling": over}
    loop = looped(seed, groups, k, refused=refused, lazy_trainer=lazy_trainer, **how)
    group_ids = [t for _, t, _ in loop.trained]
    assert len(group_ids) == len(set(group_ids)) == STEPS * groups
    assert all(0 <= step - oldest <= k for step, _, oldest in loop.trained)
    assert set(loop.buffer.dropped) <= {"refused", OVERSAMPLED}
    if k:
        assert OVERSAMPLED not in loop.buffer.dropped or lockstep
    for step in range(STEPS):
        of_step = [t for s, t, _ in loop.trained if s == step]
        assert of_step == sorted(of_step)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_in_lockstep_the_weights_of_a_group_follow_from_its_step_alone(k: int) -> None:
    """The staleness is k, once k versions were published; the clock is the adversary's, the order is not."""
    for seed in range(5):
        loop = looped(seed, 3, k, refused=0.0, lazy_trainer=0.5, lockstep=True)
        assert loop.trained == [(step, 3 * step + i, max(0, step - k)) for step in range(STEPS) for i in range(3)]


def test_back_fill_passes_over_who_is_late() -> None:
    """In free mode, with an adversary that holds the oldest group back, younger groups are trained before it: the bound
    does not require waiting for all groups."""
    order = [t for _, t, _ in looped(3, 2, 2, refused=0.0, lazy_trainer=0.0).trained]
    assert order != sorted(order)
    stale = [s - v for s, _, v in looped(3, 2, 2, refused=0.0, lazy_trainer=0.0).trained]
    assert max(stale) == 2
