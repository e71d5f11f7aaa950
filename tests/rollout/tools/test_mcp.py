"""Tools of a real server of the Model Context Protocol, over standard input and output.

Not covered: servers that speak streamable HTTP, which the same client reaches.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import pytest

from miles_like.types import EnvironmentLost
from rollout.chat.turns import Call
from rollout.tool_config import McpServerConfig, ToolConfig
from rollout.tools.load import Tools
from rollout.tools.toolset import Toolset
from tests.support import mcp_server
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow  # each test starts servers


def config(notes: Path, session: Literal["run", "episode"] = "run") -> ToolConfig:
    args = (mcp_server.__file__, os.pathsep.join(sys.path), str(notes))
    server = McpServerConfig(command=sys.executable, args=args, session=session)
    return ToolConfig(mcp_servers={"numbers": server})


def left(notes: Path) -> list[int]:
    """Servers that still run, a moment after they were asked to end."""
    until = time.monotonic() + 5
    while True:
        pids = [int(line) for line in notes.read_text().split()]
        found = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.05)


def started(notes: Path) -> int:
    return len(notes.read_text().split())


async def told(tools: Toolset, name: str, **arguments: Any) -> tuple[str, str]:
    result = await tools.answer(Call(name=name, arguments=arguments, text=""))
    return result.status, result.text


def run(play: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(play())


def test_tools_are_listed_and_called(tmp_path: Path) -> None:
    """Episodes share a session of the run, whose server a lost one takes the place of."""
    notes = tmp_path / "notes"
    tools = Tools(config(notes))
    assert [s["function"]["name"] for s in tools.specs] == ["multiply", "count", "broken", "leave"]
    multiply = tools.specs[0]["function"]
    assert multiply["description"] == "Multiplies two integers."
    assert multiply["parameters"]["properties"]["a"]["type"] == "integer"
    assert left(notes) == []  # the server that gave the list

    async def play() -> None:
        (a, close_a), (b, close_b) = tools.for_episode(), tools.for_episode()
        assert not close_a and not close_b
        assert await told(a, "multiply", a=6, b=7) == ("ok", "42")
        assert (await told(a, "multiply", a="x", b=7))[0] == "failed"
        assert await told(a, "count") == ("ok", "call 1") and await told(b, "count") == ("ok", "call 2")
        status, text = await told(b, "broken")
        assert status == "failed" and "broken" in text
        assert started(notes) == 2
        with pytest.raises(EnvironmentLost, match="leave"):
            await told(a, "leave")
        assert await told(b, "count") == ("ok", "call 1") and started(notes) == 3
        await tools.close()

    run(play)
    assert left(notes) == []


@pytest.mark.long(beside="tests/rollout/tools/test_tool_environment.py")
def test_an_episode_has_its_own_session(tmp_path: Path) -> None:
    """It begins with the first call, and ends with the episode."""
    notes = tmp_path / "notes"
    tools = Tools(config(notes, "episode"))

    async def play() -> None:
        (a, (close_a,)), (b, (close_b,)), (_, (close_c,)) = (tools.for_episode() for _ in range(3))
        assert [await told(a, "count"), await told(b, "count")] == [("ok", "call 1")] * 2
        await asyncio.gather(close_a(), close_b(), close_c())
        assert started(notes) == 3 and left(notes) == []

    run(play)


def test_a_server_that_does_not_start_is_refused() -> None:
    with refuses(ValueError, "rollout.tools.mcp_servers.gone", "/nowhere/server"):
        Tools(ToolConfig(mcp_servers={"gone": McpServerConfig(command="/nowhere/server")}))
    with refuses(ValueError, "rollout.tools.mcp_servers.dumb", "list of tools"):
        dumb = McpServerConfig(command="sleep", args=("60",), start_timeout_s=0.3)
        Tools(ToolConfig(mcp_servers={"dumb": dumb}))
