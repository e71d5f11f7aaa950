"""Virtual time has the order of real time, and passes without waiting."""

from __future__ import annotations

import asyncio

import pytest

from miles_like.simulation.clock.timeline import (
    ServerInterval,
    ServerTimeline,
    TrainerInterval,
    TrainerTimeline,
    running_mean,
    shares,
    while_idle,
)
from miles_like.simulation.clock.virtual_time import now, run_virtual
from tests.support.refusals import refuses


def test_a_year_passes_at_once_and_events_keep_their_order() -> None:
    seen: list[tuple[float, str]] = []

    async def sleeper(name: str, *waits: float) -> None:
        for seconds in waits:
            await asyncio.sleep(seconds)
            seen.append((now(), name))

    async def body() -> float:
        await asyncio.gather(sleeper("a", 3.0, 4.0), sleeper("b", 5.0), sleeper("c", 365 * 86400.0))
        return now()

    assert run_virtual(body()) == pytest.approx(365 * 86400.0, rel=1e-12)
    assert seen[:3] == [(3.0, "a"), (5.0, "b"), (7.0, "a")]


def test_a_time_limit_ends_a_wait_at_its_time() -> None:
    async def body() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(body()) == 2.5


def test_a_run_in_which_all_wait_for_each_other_ends() -> None:
    async def body() -> None:
        await asyncio.Event().wait()

    with refuses(RuntimeError, "never"):
        run_virtual(body())


def test_time_without_a_phase_is_other_and_an_inner_phase_interrupts_the_outer_one() -> None:
    async def body() -> list[TrainerInterval]:
        timeline = TrainerTimeline()
        await asyncio.sleep(1)
        with timeline.phase("save"):
            await asyncio.sleep(2)
            with timeline.phase("turn"):
                await asyncio.sleep(3)
            await asyncio.sleep(4)
        await asyncio.sleep(5)
        timeline.close()
        return timeline.intervals

    found = run_virtual(body())
    assert [(i.begin, i.end, i.state) for i in found] == [
        (0, 1, "other"),
        (1, 3, "save"),
        (3, 6, "turn"),
        (6, 10, "save"),
        (10, 15, "other"),
    ]
    assert shares(found, 2, 7) == {"save": 2, "turn": 3}


def test_shares_of_a_server_are_of_the_window_alone() -> None:
    timeline = ServerTimeline()
    for time, state, running in ((2.0, "busy", 4), (4.0, "busy", 8), (6.0, "paused", 8), (7.0, "idle", 0)):
        timeline.note(time, state, running)
    timeline.close(10.0)
    assert timeline.intervals[0] == ServerInterval(0.0, 2.0, "idle", 0)
    assert shares(timeline.intervals, 1, 9) == {"idle": 1 + 2, "busy": 4, "paused": 1}
    assert running_mean(timeline.intervals, 1, 9) == pytest.approx((2 * 4 + 2 * 8) / 4)
    trainer = [TrainerInterval(0, 1.5, "samples"), TrainerInterval(1.5, 8, "train"), TrainerInterval(8, 10, "publish")]
    assert while_idle(timeline.intervals, trainer, 1, 9) == {"samples": 0.5, "train": 0.5 + 1, "publish": 1}
