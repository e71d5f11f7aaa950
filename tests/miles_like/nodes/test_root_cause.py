"""Which error of several ranks is the one that is reported."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import RayActorError, RayError, RayTaskError

from miles_like.nodes import waits

CLOSED = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [192.0.2.2]:40101"


def failed(text: str) -> RayTaskError:
    error = RuntimeError(text)
    return RayTaskError("publish", "", error)


def found(error: RayError, monkeypatch: pytest.MonkeyPatch) -> RayError:
    """Where another rank's death becomes known after the limit of a process, and before that of a node."""
    monkeypatch.setattr(waits, "_DEATH_IS_KNOWN_S", 0.05)
    monkeypatch.setattr(waits, "_NODE_IS_LOST_S", 30.0)

    async def run() -> RayError:
        loop = asyncio.get_running_loop()
        answers = [loop.create_future() for _ in range(2)]
        answers[0].set_exception(error)
        loop.call_later(0.5, answers[1].set_exception, RayActorError())
        try:
            return await waits.root_cause(error, answers)
        finally:
            await asyncio.wait(answers)
            answers[1].exception()

    return asyncio.run(run())


def test_a_lost_connection_waits_until_a_lost_node_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(found(failed(CLOSED), monkeypatch), RayActorError)


@pytest.mark.parametrize("text", ["a shape of 3 does not fit", "CUDA out of memory"])
def test_an_error_of_the_rank_itself_does_not(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = failed(text)
    assert found(error, monkeypatch) is error
