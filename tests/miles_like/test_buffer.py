"""The buffer hands out the oldest admitted first and nothing too stale.

Taking groups as they finish lets short answers overtake long ones without bound. Not covered: the number of tickets in
flight, which is the loop's to bound.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from made_samples import rewarded

from miles_like.buffer import DataBuffer


def names(groups) -> list[str]:
    return [g.prompt.id for g in groups]


def test_order_is_that_of_admission_not_of_finishing():
    async def run() -> None:
        buffer = DataBuffer(max_staleness=9)
        tickets = [buffer.admit() for _ in range(6)]
        for t in random.Random(0).sample(tickets, 6):
            await buffer.put(t, rewarded([0, 1], prompt_id=f"p{t}"))
        assert names(await buffer.take(4, version=0)) == ["p0", "p1", "p2", "p3"]
        assert len(buffer) == 2 and buffer.in_flight == 0

    asyncio.run(run())


def test_take_waits_for_the_oldest_though_younger_are_ready():
    async def run() -> None:
        buffer = DataBuffer(max_staleness=0)
        slow, *fast = (buffer.admit() for _ in range(3))
        for t in fast:
            await buffer.put(t, rewarded([0, 1], prompt_id=f"p{t}"))
        taking = asyncio.create_task(buffer.take(2, version=0))
        await asyncio.sleep(0.02)
        assert not taking.done() and len(buffer) == 2 and buffer.in_flight == 1
        await buffer.put(slow, rewarded([0, 1], prompt_id="slow"))
        assert names(await taking) == ["slow", "p1"]

    asyncio.run(run())


def test_a_discarded_ticket_holds_up_nobody():
    async def run() -> None:
        buffer = DataBuffer(max_staleness=0)
        a, b = buffer.admit(), buffer.admit()
        await buffer.put(b, rewarded([0, 1], prompt_id="b"))
        taking = asyncio.create_task(buffer.take(1, version=0))
        await asyncio.sleep(0)
        await buffer.discard(a, reason="aborted")
        assert names(await taking) == ["b"] and buffer.dropped == {"aborted": 1}

    asyncio.run(run())


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_staleness_bound_is_sharp(bound):
    """A group of exactly the bound is handed out, one version older is dropped and counted."""

    async def run() -> None:
        buffer = DataBuffer(max_staleness=bound)
        for v in range(6):
            await buffer.put(buffer.admit(), rewarded([0, 1], prompt_id=f"v{v}", version=v))
        taken = await buffer.take(bound + 1, version=5)
        assert names(taken) == [f"v{v}" for v in range(5 - bound, 6)]
        assert buffer.dropped == {"stale": 5 - bound}

    asyncio.run(run())


def test_a_saved_state_goes_on_as_the_original():
    async def run() -> None:
        buffer = DataBuffer(max_staleness=1)
        for v in (0, 3, 4):
            await buffer.put(buffer.admit(), rewarded([0, 1], prompt_id=f"v{v}", version=v))
        buffer.admit()  # in flight when saved: issued again, not kept
        assert names(await buffer.take(1, version=4)) == ["v3"]
        state = buffer.state()
        resumed = DataBuffer(max_staleness=1)
        resumed.restore(state)
        assert resumed.dropped == {"stale": 1}
        await resumed.put(resumed.admit(), rewarded([0, 1], prompt_id="new", version=4))
        assert names(await resumed.take(2, version=5)) == ["v4", "new"]
        with pytest.raises(ValueError, match="has admitted 2 prompts"):
            resumed.restore(state)

    asyncio.run(run())


def test_misuse_is_refused():
    async def run() -> None:
        buffer = DataBuffer(max_staleness=0)
        with pytest.raises(ValueError, match="ticket 0 is not in flight: 0 were admitted"):
            await buffer.put(0, rewarded([0, 1]))
        ticket = buffer.admit()
        await buffer.put(ticket, rewarded([0, 1]))
        with pytest.raises(ValueError, match="ticket 0 is not in flight"):
            await buffer.discard(ticket, reason="twice")

    asyncio.run(run())
    with pytest.raises(ValueError, match="max_staleness -1"):
        DataBuffer(max_staleness=-1)
