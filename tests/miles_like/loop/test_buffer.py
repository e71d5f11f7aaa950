"""The buffer hands out the oldest admitted first and nothing too stale.

Taking groups as they finish lets short answers overtake long ones without bound. Not covered: the number of tickets in
flight, which is the producer's to bound (tests/laws/test_staleness_bound.py).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from miles_like.checkpoint.ledger import Ledger
from miles_like.loop.buffer import DataBuffer, Taken
from miles_like.loop.rollout_stats import RolloutStats
from miles_like.types import Prompt, SampleGroup, VersionSpan
from tests.support.made_samples import rewarded
from tests.support.refusals import refuses


def names(taken: Sequence[Taken]) -> list[str]:
    return [t.group.prompt.id for t in taken]


def prompt(name: object) -> Prompt:
    return Prompt(id=f"{name}", token_ids=(1, 2), answer="")


def admitted(buffer: DataBuffer, *names: object, version: int = 0) -> list[int]:
    return [buffer.admit(prompt(n), version=version) for n in names]


def made(name: object, version: int = 0) -> SampleGroup:
    return rewarded([0, 1], prompt_id=f"{name}", version=version)


def buffered(k: int, **how: Any) -> DataBuffer:
    return DataBuffer(max_staleness=k, samples=2, **how)


def test_order_is_that_of_admission_not_of_finishing() -> None:
    async def run() -> None:
        buffer = buffered(9)
        group_ids = admitted(buffer, *range(6))
        for t in random.Random(0).sample(group_ids, 6):
            await buffer.put(t, made(t))
        assert names(await buffer.take(4, version=0)) == ["0", "1", "2", "3"]
        assert len(buffer) == 2 and buffer.in_flight == 0 and buffer.outstanding == 6
        buffer.trained(4)
        assert buffer.outstanding == 2

    asyncio.run(run())


def test_take_waits_for_the_oldest_though_younger_are_ready() -> None:
    async def run() -> None:
        buffer = buffered(0)
        slow, *fast = admitted(buffer, "slow", 1, 2)
        for t in fast:
            await buffer.put(t, made(t))
        taking = asyncio.create_task(buffer.take(2, version=0))
        await asyncio.sleep(0.02)
        assert not taking.done() and len(buffer) == 2 and buffer.in_flight == 1
        await buffer.put(slow, made("slow"))
        assert names(await taking) == ["slow", "1"]

    asyncio.run(run())


def test_back_fill_passes_over_a_late_group_until_it_would_be_too_old() -> None:
    """k = 1, two groups a step: both late ones of version 0 can wait for step 1 but not a third."""

    async def run() -> None:
        buffer = buffered(1, backfill=True)
        late = admitted(buffer, "late 0", "late 1")
        for t in admitted(buffer, 2, 3):
            await buffer.put(t, made(t))
        assert names(await buffer.take(2, version=0)) == ["2", "3"]
        buffer.trained(2)
        for t in admitted(buffer, 4, 5, version=1):
            await buffer.put(t, made(t, 1))
        taking = asyncio.create_task(buffer.take(2, version=1))
        await asyncio.sleep(0.02)
        assert not taking.done()
        for t in late:
            await buffer.put(t, made(f"late {t}"))
        assert names(await taking) == ["late 0", "late 1"] and not buffer.dropped

    asyncio.run(run())


def test_a_discarded_ticket_holds_up_nobody() -> None:
    async def run() -> None:
        buffer = buffered(0)
        a, b = admitted(buffer, "a", "b")
        await buffer.put(b, made("b"))
        taking = asyncio.create_task(buffer.take(1, version=0))
        await asyncio.sleep(0)
        await buffer.discard(a, reason="aborted")
        assert names(await taking) == ["b"] and buffer.dropped == {"aborted": 1}

    asyncio.run(run())


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_staleness_bound_is_sharp(bound: int) -> None:
    """A group of exactly the bound is handed out, one version older is dropped and counted."""

    async def run() -> None:
        buffer = buffered(bound)
        for v in range(6):
            (t,) = admitted(buffer, f"v{v}", version=v)
            await buffer.put(t, made(f"v{v}", v))
        taken = await buffer.take(bound + 1, version=5)
        assert names(taken) == [f"v{v}" for v in range(5 - bound, 6)]
        assert buffer.dropped == {"stale": 5 - bound}

    asyncio.run(run())


def test_old_tokens_are_taken_out_of_a_group_that_is_too_old_for_them() -> None:
    """One that has none left is dropped."""

    async def run() -> None:
        buffer = buffered(0, mask_old_tokens=True)
        groups = made("some", 1), made("none", 1)
        first, second = groups[0].samples
        young = replace(first, versions=(VersionSpan(1, 0, 2), VersionSpan(2, 2, 3)))
        groups = replace(groups[0], samples=(young, second)), groups[1]
        for t, g in zip(admitted(buffer, "some", "none", version=1), groups, strict=True):
            await buffer.put(t, g)
        (taken,) = await buffer.take(1, version=2)
        assert taken.group.prompt.id == "some" and taken.group.oldest_version == 2
        assert [s.response_len for s in taken.group.samples] == [1, 0]
        assert buffer.dropped == {"stale": 1}

    asyncio.run(run())


def test_a_saved_state_goes_on_as_the_original() -> None:
    """With its tickets, what is ready and what is in flight."""

    async def run() -> None:
        ledger = Ledger(None)
        buffer = buffered(1, ledger=ledger)
        for v in (0, 3, 4):
            (t,) = admitted(buffer, f"v{v}", version=v)
            await buffer.put(t, made(f"v{v}", v), RolloutStats(rounds=v))
        admitted(buffer, "in flight", version=4)
        assert names(await buffer.take(1, version=4)) == ["v3"]
        state, groups = buffer.state()
        after = Ledger(None)
        after._open = dict(ledger._open)
        resumed = buffered(1, ledger=after)
        resumed.restore(json.loads(json.dumps(state)), groups, prompt)
        assert resumed.dropped == {"stale": 1} and resumed.group_ids == (2, 3)
        assert resumed.prompts_in_flight == {3: prompt("in flight")}
        await resumed.put(3, made("in flight", 4))
        taken = await resumed.take(2, version=5)
        assert names(taken) == ["v4", "in flight"] and [t.stats.rounds for t in taken] == [4, 0]
        with refuses(ValueError, 4):
            resumed.restore(state, groups, prompt)

    asyncio.run(run())


def test_misuse_is_refused() -> None:
    async def run() -> None:
        buffer = buffered(0)
        with refuses(RuntimeError, 0, 0):
            await buffer.put(0, made(0))
        (group_id,) = admitted(buffer, 0)
        with refuses(RuntimeError, 0, 0, 1):
            await buffer.put(group_id, made(1))
        await buffer.put(group_id, made(0))
        with refuses(RuntimeError, 0, 1):
            await buffer.put(group_id, made(0))
        with refuses(RuntimeError, 0, 1):
            await buffer.discard(group_id, reason="twice")

    asyncio.run(run())
    with refuses(ValueError, "max_staleness", -1):
        DataBuffer(max_staleness=-1)
