"""The tools of an episode, and the answer to each call, which a malformed one gets too."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollout.chat.turns import INVALID_JSON, MALFORMED, MISSING_NAME, OK, UNCLOSED, Call, Tool
from rollout.tools.results import FAILED, TIMEOUT, UNKNOWN_TOOL, WRONG_ARGUMENTS, Result, ToolError, WrongArguments

_UNREAD = {
    INVALID_JSON: "its arguments are not a JSON object",
    MISSING_NAME: "it has no function name",
    MALFORMED: "it is not in the form of a tool call",
    UNCLOSED: "it has no end",
}


class AnyTool(Protocol):
    """A tool: a function of this process, or of an MCP server."""

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> Tool: ...
    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Raises WrongArguments and ToolError, which the model reads; EnvironmentLost where the tool is not there."""


class Toolset:
    """Tools under their names.

    timeout_s: time limit of a call. max_chars: of a result, of which the rest is cut. Raises ValueError for two tools
    of one name.
    """

    def __init__(self, tools: Sequence[AnyTool], *, timeout_s: float, max_chars: int) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._timeout_s, self._max_chars = timeout_s, max_chars
        if twice := {t.name for t in tools if sum(o.name == t.name for o in tools) > 1}:
            raise ValueError(
                f"rollout.tools has more than one tool of the name {min(twice)!r}, by which the model calls it: rename "
                "one, or remove its server"
            )
        self.specs: tuple[Tool, ...] = tuple(tool.spec for tool in tools)

    async def answer(self, call: Call) -> Result:
        """What the model reads of `call`. A failure is an answer; EnvironmentLost is raised."""
        if call.status != OK or call.arguments is None:
            why = _UNREAD.get(call.status, call.status)
            if call.status not in (UNKNOWN_TOOL, OK):
                return Result(f"The tool call was not made: {why}. Write it again.", call.status)
        if call.name not in self._tools or call.arguments is None:
            known = ", ".join(self._tools)
            return Result(f"The tool call was not made: there is no tool {call.name!r}. Tools: {known}.", UNKNOWN_TOOL)
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                text = await self._tools[call.name].call(call.arguments)
        except WrongArguments as e:
            return Result(f"The tool call was not made: {e}.", WRONG_ARGUMENTS)
        except ToolError as e:
            return Result(self._cut(f"The tool failed: {e}"), FAILED)
        except TimeoutError:
            if not limit.expired():
                raise
            return Result(f"The tool did not answer within {self._timeout_s:g} s.", TIMEOUT)
        return Result(self._cut(text), OK)

    def _cut(self, text: str) -> str:
        left = len(text) - self._max_chars
        return text if left <= 0 else f"{text[: self._max_chars]} [{left} more characters]"
