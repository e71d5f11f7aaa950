"""The client of OpenEnv servers, against a server with the messages of openenv 0.10 (core/env_server/types.py).

Not covered: openenv's own server, which needs packages that nothing else here needs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter
from websockets.asyncio.server import ServerConnection, serve

from miles_like.rewards.answered import answered_sample
from miles_like.types import EnvironmentLost, Observation, Prompt
from rollout.environments.openenv_client import OpenEnv
from tests.support.refusals import refuses


class Reset(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["reset"]
    data: dict[str, Any]


class Step(BaseModel):
    model_config = ConfigDict(extra="forbid")
    type: Literal["step"]
    data: dict[str, Any]


INCOMING: TypeAdapter[Reset | Step] = TypeAdapter(Reset | Step)
Answer = Callable[[Reset | Step, int], Mapping[str, Any] | None]  # message and its number; None: the connection ends


def observed(observation: Mapping[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": dict(observation), "reward": reward, "done": done}}


def count_down(message: Reset | Step, number: int) -> dict[str, Any]:
    """An environment in which each step is worth its size, and the third ends it."""
    if isinstance(message, Reset):
        return observed({"left": 3, "seed": message.data["seed"]}, None, False)
    return observed({"left": 3 - number, "echo": message.data["message"]}, float(number), number == 3)


def play(answer: Answer, turns: list[str], **attributes: Any) -> tuple[list[Observation], int]:
    """The observations of an episode, and the connections that are open after it."""

    async def all_of() -> tuple[list[Observation], int]:
        open_ones = 0

        async def session(socket: ServerConnection) -> None:
            nonlocal open_ones
            assert socket.request is not None and socket.request.path == "/ws"
            open_ones += 1
            number = 0
            try:
                async for text in socket:
                    reply = answer(INCOMING.validate_json(text), number)
                    number += 1
                    if reply is None:
                        return
                    await socket.send(json.dumps(reply))
            finally:
                open_ones -= 1

        async with serve(session, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            made = type("Made", (OpenEnv,), {"url": f"ws://127.0.0.1:{port}", **attributes})
            prompt = Prompt(id="a", token_ids=(1,), answer="", meta={"seed": 7})
            environment = made(prompt, seed=0)
            found = [await environment(answered_sample(prompt, 0, [2], ""), turn) for turn in turns]
            await environment.close()
            await asyncio.sleep(0.05)
            return found, open_ones

    return asyncio.run(all_of())


def test_an_episode_of_steps() -> None:
    found, left = play(count_down, ["a", "b", "c"])
    assert [one.reward for one in found] == [1.0, 2.0, 3.0] and [one.ends for one in found] == [False, False, True]
    assert found[0].text == '\n{"echo": "a", "left": 2}\n' and left == 0


def test_the_first_observation_where_the_first_turn_is_no_action() -> None:
    def action(self: OpenEnv, turn: str) -> Mapping[str, Any] | None:
        return {"message": turn} if turn != "?" else None

    found, left = play(count_down, ["hello", "?", "b"], begins=True, action=action, role="user")
    contents = [one.messages[0]["content"] for one in found]
    assert contents == ['{"left": 3, "seed": 7}', OpenEnv.refusal, '{"echo": "b", "left": 2}'] and left == 0


def failed(code: str, message: str) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code}}


@pytest.mark.parametrize("code", ["VALIDATION_ERROR", "EXECUTION_ERROR"])
def test_an_action_that_cannot_be_done_is_answered(code: str) -> None:
    """By the server's message; the episode goes on."""

    def answer(message: Reset | Step, number: int) -> Mapping[str, Any]:
        return failed(code, "no such action") if number == 1 else count_down(message, number)

    found, left = play(answer, ["a", "b", "c"])
    assert found[0].text == "\nno such action\n" and [one.ends for one in found] == [False, False, True] and left == 0


@pytest.mark.parametrize(("status", "error"), [(404, RuntimeError), (503, EnvironmentLost)])
def test_a_server_without_the_path_ends_the_run_and_one_that_is_busy_loses_the_episode(
    status: int, error: type[Exception]
) -> None:
    async def run() -> None:
        def no(connection: ServerConnection, request: Any) -> Any:
            return connection.respond(status, "")

        async def session(socket: ServerConnection) -> None:
            """Is not reached."""

        async with serve(session, "127.0.0.1", 0, process_request=no) as server:
            made = type("Made", (OpenEnv,), {"url": f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
            prompt = Prompt(id="a", token_ids=(1,), answer="")
            await made(prompt, seed=0)(answered_sample(prompt, 0, [2], ""), "a")

    with refuses(error, status):
        asyncio.run(run())


def test_a_server_that_ends_loses_the_episode_and_an_error_ends_the_run() -> None:
    with refuses(EnvironmentLost, "OpenEnv", "ConnectionClosedOK"):
        play(lambda message, number: count_down(message, number) if number < 2 else None, ["a", "b"])
    with refuses(EnvironmentLost, "OpenEnv", "ConnectionRefusedError"):
        play(count_down, ["a"], url="ws://127.0.0.1:1")
    full = failed("CAPACITY_REACHED", "8 sessions")
    with refuses(EnvironmentLost, "OpenEnv", "room"):
        play(lambda message, number: full, ["a"])
    for broken in (failed("FACTORY_ERROR", "no factory"), failed("EXECUTION_ERROR", "no level")):
        with refuses(RuntimeError, "reset", broken["data"]["message"]):
            play(lambda message, number, broken=broken: broken, ["a"])
    with refuses(ValueError, "OpenEnv.url", "ws://"):
        OpenEnv(Prompt(id="a", token_ids=(1,), answer=""), seed=0)
