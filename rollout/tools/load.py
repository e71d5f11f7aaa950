"""The tools of a run, from its configuration."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from miles_like.plugins import load
from rollout.chat.turns import Tool
from rollout.tool_config import ToolConfig
from rollout.tools.environment import Close
from rollout.tools.functions import FunctionTool
from rollout.tools.mcp import McpServer
from rollout.tools.toolset import AnyTool, Toolset


class Tools:
    """The functions and servers of `rollout.tools`.

    Raises ValueError for a function that cannot be loaded or described, a server that does not answer, and two tools
    of one name.
    """

    def __init__(self, config: ToolConfig) -> None:
        self._config = config
        self._functions: list[AnyTool] = []
        for path in config.functions:
            key = f"rollout.tools.functions {path!r}"
            self._functions.append(FunctionTool(load(path, key="rollout.tools.functions"), key))
        self._servers = [McpServer(name, server) for name, server in config.mcp_servers.items()]
        self.specs: tuple[Tool, ...] = self.for_episode()[0].specs

    def for_episode(self) -> tuple[Toolset, Sequence[Close]]:
        """The tools of one episode, and what is to be closed after it."""
        tools, closes = list(self._functions), list[Close]()
        for server in self._servers:
            found, close = server.tools()
            tools += found
            closes += [close] if close is not None else []
        config = self._config
        return Toolset(tools, timeout_s=config.timeout_s, max_chars=config.max_result_chars), closes

    async def close(self) -> None:
        """End the sessions that episodes share."""
        for server in self._servers:
            await server.close()


@functools.cache
def _loaded(dumped: str) -> Tools:
    return Tools(ToolConfig.model_validate_json(dumped))


def load_tools(config: ToolConfig) -> Tools:
    """The tools of a configuration, loaded once in each process. Raises as `Tools`."""
    return _loaded(config.model_dump_json())


class ToolTokenizer:
    """A tokenizer whose chat template gets the tools too, so that a prompt describes them."""

    def __init__(self, tokenizer: Any, specs: Sequence[Tool]) -> None:
        self._tokenizer, self._specs = tokenizer, [dict(spec) for spec in specs]

    def apply_chat_template(self, conversation: list[dict[str, str]], **how: Any) -> Any:
        return self._tokenizer.apply_chat_template(conversation, tools=self._specs, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def prompting(tokenizer: Any, config: ToolConfig) -> Any:
    """The tokenizer that prompts are made with. Raises as `Tools`."""
    return ToolTokenizer(tokenizer, load_tools(config).specs) if config.given else tokenizer
