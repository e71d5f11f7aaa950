"""Tools of servers of the Model Context Protocol, by its official client (the package `mcp`)."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from miles_like.limits.user_errors import raised
from miles_like.types import EnvironmentLost
from miles_like.variables import filled
from rollout.chat.library import INSTALL
from rollout.chat.turns import Tool
from rollout.tool_config import McpServerConfig
from rollout.tools.functions import as_text
from rollout.tools.results import ToolError

if TYPE_CHECKING:
    from mcp import Client

_CLOSE_S = 10.0  # the client ends a server's process within 7 s


class Session:
    """One connection to a server. A task enters and leaves it, since the client's scopes belong to a task; other tasks
    of its event loop call tools."""

    def __init__(self, name: str, config: McpServerConfig) -> None:
        self._name, self._config = name, config
        self._task: asyncio.Task[None] | None = None
        self._opened: asyncio.Future[Client] | None = None
        self._leave = asyncio.Event()

    async def client(self) -> Client:
        """Connected with the first call. Raises EnvironmentLost for a server that does not answer."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._opened), name=f"MCP server {self._name}")
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                return await asyncio.shield(self._opened)
        except Exception as e:  # of the transport, the process or the protocol
            raise EnvironmentLost(f"MCP server {self._name} does not answer ({raised(e)})") from e

    @property
    def ended(self) -> bool:
        """Whether no further call can be answered."""
        return self._leave.is_set() or (self._task is not None and self._task.done())

    def lose(self) -> None:
        """The server has closed the connection: its task ends."""
        self._leave.set()

    async def close(self) -> None:
        """Ends the connection, and the process of a server that this one started."""
        self._leave.set()
        if self._task is None or self._opened is None:
            return
        if not self._opened.done():
            self._task.cancel()
        await asyncio.wait([self._task], timeout=_CLOSE_S)
        self._task.cancel()

    async def _hold(self, opened: asyncio.Future[Client]) -> None:
        try:
            async with _client(self._name, self._config) as client:
                opened.set_result(client)
                await self._leave.wait()
        except Exception as e:  # an exception group, of any of the client's tasks
            if not opened.done():
                opened.set_exception(e)
                opened.exception()  # a caller whose time is over does not read it


def _client(name: str, config: McpServerConfig) -> Client:
    from mcp import Client, StdioServerParameters

    if config.url is not None:
        return Client(config.url)
    assert config.command is not None, "McpServerConfig requires one of the two"
    env = filled(f"rollout.tools.mcp_servers.{name}.env", config.env)
    return Client(StdioServerParameters(command=config.command, args=list(config.args), env=env))


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server. session: the connection that a call uses."""

    name: str
    spec: Tool
    session: Callable[[], Session]

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """The text of the result. Raises ToolError for one that the server marks as an error, EnvironmentLost for a
        server that does not answer."""
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        session = self.session()
        client = await session.client()
        try:
            found = await client.call_tool(self.name, dict(arguments))
        except MCPError as e:
            if e.error.code == CONNECTION_CLOSED:
                session.lose()
                raise EnvironmentLost(f"the MCP server of tool {self.name} has ended") from e
            raise ToolError(str(e.error.message)) from e
        text = "\n".join(
            part.text if part.type == "text" else f"[{part.type} of {self.name}, which is not text]"
            for part in found.content
        )
        text = text or as_text(found.structured_content)
        if found.is_error:
            raise ToolError(text)
        return text


class McpServer:
    """A server of the configuration, and the specifications of its tools.

    Raises ValueError where the package is not installed, or the server gives no list of tools within its time limit.
    """

    def __init__(self, name: str, config: McpServerConfig) -> None:
        if importlib.util.find_spec("mcp") is None:
            raise ValueError(
                f"rollout.tools.mcp_servers.{name} needs a package that is not installed: {INSTALL}, or remove it"
            )
        self._name, self._config = name, config
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, Session] = WeakKeyDictionary()
        try:
            self._listed = _in_a_loop(self._list)
        except Exception as e:  # as EnvironmentLost, or of the process
            reach = config.url if config.url is not None else " ".join((str(config.command), *config.args))
            raise ValueError(
                f"rollout.tools.mcp_servers.{name} ({reach}) gives no list of tools: {raised(e)}; start it by itself "
                "to see why"
            ) from e

    async def _list(self) -> Sequence[tuple[str, Tool]]:
        session = Session(self._name, self._config)
        try:
            client = await session.client()
            async with asyncio.timeout(self._config.start_timeout_s):
                found = (await client.list_tools()).tools
        finally:
            await session.close()
        return [
            (
                t.name,
                {
                    "type": "function",
                    "function": {"name": t.name, "description": t.description or "", "parameters": t.input_schema},
                },
            )
            for t in found
        ]

    def tools(self) -> tuple[Sequence[McpTool], Callable[[], Awaitable[None]] | None]:
        """Its tools for one episode, and what closes their session where it belongs to the episode."""
        if self._config.session == "run":
            return [McpTool(name, spec, self._session) for name, spec in self._listed], None
        opened: list[Session] = []

        def session() -> Session:
            if not opened:
                opened.append(Session(self._name, self._config))
            return opened[0]

        async def close() -> None:
            for one in opened:
                await one.close()

        return [McpTool(name, spec, session) for name, spec in self._listed], close

    async def close(self) -> None:
        """End the session of this event loop."""
        session = self._shared.pop(asyncio.get_running_loop(), None)
        if session is not None:
            await session.close()

    def _session(self) -> Session:
        """Of this event loop; another one after a server that has ended."""
        loop = asyncio.get_running_loop()
        session = self._shared.get(loop)
        if session is None or session.ended:
            session = self._shared[loop] = Session(self._name, self._config)
        return session


def _in_a_loop(call: Callable[[], Awaitable[Any]]) -> Any:
    """The result of a coroutine function, in a loop of a thread of this call: the caller's may be running."""
    done: Future[Any] = Future()

    async def run() -> Any:
        return await call()

    def work() -> None:
        try:
            done.set_result(asyncio.run(run()))
        except BaseException as e:
            done.set_exception(e)

    threading.Thread(target=work, name="MCP tools", daemon=True).start()
    return done.result()
