"""SIGTERM ends a run in order, wherever it comes: also in code of a user's that takes any exception for an answer.

Not covered: a whole run (tests/e2e/test_faults.py), and a SIGTERM between Ray's start and the loop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from miles_like import stopping
from miles_like.stopping import run_to_end

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
        raise ValueError("said")

    assert run_to_end(answer()) == 42
    with pytest.raises(ValueError, match="said"):
        run_to_end(wrong())
