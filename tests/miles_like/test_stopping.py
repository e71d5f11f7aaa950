"""SIGTERM ends a run in order, wherever it comes: also in code of a user's that takes any exception for an answer.

Not covered: a whole run (tests/e2e/test_faults.py), and a SIGTERM between Ray's start and the loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from typing import Any

import pytest

from miles_like import stopping
from miles_like.stopping import Deadline, Stopped, StopRequest, beside_loop, command_began, run_began, run_to_end
from tests.support.refusals import refuses

SEEN: list[str] = []


def careless_reward() -> float:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        return 1.0
    except BaseException:
        SEEN.append("raised inside")
        return 0.0


async def scored(*, fails_to_close: bool = False) -> str:
    try:
        value = careless_reward()
        await asyncio.sleep(30)
        return f"trained on {value}"
    finally:
        SEEN.append("closed")
        if fails_to_close:
            raise OSError("cannot be closed")


@pytest.mark.parametrize("fails_to_close", [False, True])
def test_sigterm_ends_what_runs_and_is_raised_inside_none_of_it(fails_to_close: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    SEEN.clear()
    with pytest.raises(SystemExit) as end:
        run_to_end(scored(fails_to_close=fails_to_close))
    assert end.value.code == 143 and SEEN == ["closed"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_does_not_cut_the_cleaning_up_short() -> None:
    async def closed_slowly() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.05)
            SEEN.append("closed")

    SEEN.clear()
    with pytest.raises(SystemExit):
        run_to_end(closed_slowly())
    assert SEEN == ["closed"]


@pytest.mark.parametrize("again", [True, False])
def test_what_blocks_the_loop_is_interrupted_by_a_second_one_and_after_a_while_by_itself(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "PATIENCE_S", 60.0 if again else 0.1)

    async def blocked() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            if again:
                os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(30)
            SEEN.append("not interrupted")
        finally:
            SEEN.append("closed")

    SEEN.clear()
    with pytest.raises(SystemExit) as end:
        run_to_end(blocked())
    assert end.value.code == 143 and SEEN == ["closed"]


def test_without_sigterm_it_is_asyncio_run() -> None:
    async def answer() -> int:
        return 42

    async def wrong() -> None:
        raise ValueError("reason")

    assert run_to_end(answer()) == 42
    with refuses(ValueError, "reason"):
        run_to_end(wrong())


def term(times: int = 1) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signal.SIGTERM)


def asked(body: Any, *, grace_s: float) -> BaseException:
    """How `body(stop)` ends under `run_to_end`."""
    stop = StopRequest()
    SEEN.clear()
    with pytest.raises((SystemExit, Stopped)) as end:
        run_to_end(body(stop), stop, grace_s)
    return end.value


def test_sigterm_asks_first_and_the_loop_ends_where_it_can_save() -> None:
    async def loop(stop: StopRequest) -> None:
        term()
        await stop.wait()
        await asyncio.sleep(0.05)
        SEEN.append("saved")
        raise stop.stopped(7)

    end = asked(loop, grace_s=30)
    assert isinstance(end, Stopped) and end.status == 143 and SEEN == ["saved"]
    assert str(end) == "SIGTERM: step 7 is saved, --resume continues from it"
    assert "nothing is saved yet" in str(StopRequest().stopped(None))


@pytest.mark.parametrize("times", [1, 2])
def test_a_loop_that_does_not_end_in_time_is_cancelled_and_by_a_second_one_at_once(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "PATIENCE_S", 60.0)  # nothing else ends it

    async def loop(stop: StopRequest) -> None:
        try:
            term()
            await stop.wait()
            term(times - 1)
            await asyncio.sleep(3)
            SEEN.append("not cancelled")
        finally:
            SEEN.append("closed")

    end = asked(loop, grace_s=0.05 if times == 1 else 60)
    assert isinstance(end, SystemExit) and end.code == 143 and SEEN == ["closed"]


def test_a_loop_that_hears_nothing_is_interrupted_by_a_second_one() -> None:
    async def blocked(stop: StopRequest) -> None:
        try:
            term(2)
            threading.Event().wait(30)
            SEEN.append("not interrupted")
        finally:
            SEEN.append("closed")

    end = asked(blocked, grace_s=60)
    assert isinstance(end, SystemExit) and SEEN == ["closed"]


def test_the_deadline_asks_while_a_step_and_a_save_still_fit() -> None:
    """100 s from 1000 on. Steps of 10 and 12 s, a save of 8 s: a further step and save need 20 s."""

    async def run() -> None:
        now = [1000.0]
        stop = StopRequest()
        deadline = Deadline(stop, 100.0, began=1000.0, clock=lambda: now[0])
        for at, step_s, save_s in ((1010.0, 10.0, None), (1030.0, 12.0, 8.0), (1080.0, 9.0, 3.0)):
            now[0] = at
            deadline.note(step_s, save_s)
            assert not stop.asked
        now[0] = 1080.5
        deadline.note(9.0)
        assert stop.asked and stop.status == 75
        assert stop.reason == (
            "checkpoint.deadline_s = 100: 19.5 s remain, the longest step took 12.0 s, save 8.0 s: 20.0 s together"
        )
        stop.ask("SIGTERM", 143)
        assert stop.status == 75  # the first reason stays
        deadline.close()

    asyncio.run(run())


def test_before_the_first_save_it_keeps_a_steps_time_for_one_and_a_slow_step_is_not_waited_for() -> None:
    async def run() -> None:
        now, stop = [0.0], StopRequest()
        deadline = Deadline(stop, 10.0, began=0.0, clock=lambda: now[0])
        now[0] = 8.2
        deadline.note(1.0)
        assert stop.asked and "as long as a step" in stop.reason and stop.reason.endswith("2.0 s together")
        waits = StopRequest()
        alarmed = Deadline(waits, 0.05, began=0.0, clock=lambda: 0.0)
        alarmed.note(0.001, 0.001)
        assert not waits.asked
        await asyncio.wait_for(waits.wait(), 5)
        off = Deadline(StopRequest(), None, began=0.0, clock=lambda: 1e9)
        off.note(1e6)

    asyncio.run(run())


def test_the_command_began_before_now() -> None:
    assert 0 < time.time() - command_began() < 1e6
    assert 0 < time.monotonic() - run_began() < 1e6


@pytest.mark.parametrize("days", [1, -1])
def test_a_jump_of_the_wall_clock_does_not_move_the_deadline(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    async def stopped() -> bool:
        stop, now = StopRequest(), time.time
        deadline = Deadline(stop, time.monotonic() - run_began() + 3600.0, began=run_began())
        monkeypatch.setattr(time, "time", lambda: now() + 86_400 * days)
        deadline.note(1.0, 1.0)
        deadline.close()
        return stop.asked

    assert not asyncio.run(stopped())


def test_beside_a_running_loop_a_call_may_run_its_own() -> None:
    """As in a notebook: `asyncio.run` would be refused there. Values and errors are the call's."""

    async def cell(fails: bool) -> int:
        async def work() -> int:
            await asyncio.sleep(0)
            return 1 // (not fails)

        return beside_loop(lambda: run_to_end(work()))

    assert asyncio.run(cell(False)) == 1
    with pytest.raises(ZeroDivisionError):
        asyncio.run(cell(True))
    assert not stopping._running


def test_an_interrupted_cell_cancels_the_run_and_waits_for_its_end() -> None:
    seen: list[str] = []

    async def work() -> None:
        # of the process, as by Ctrl-C: one of the timer's thread would not wake the one that waits for the cell
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
            seen.append("not cancelled")
        finally:
            await asyncio.sleep(0.1)
            seen.append("closed")

    async def cell() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # asyncio's own cancels the cell, which does not wait
        beside_loop(lambda: run_to_end(work()))

    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(cell())
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == ["closed"]
