"""The configuration of tools and of agents. Torch-free."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from miles_like.section import Section
from miles_like.variables import read_variables


class McpServerConfig(Section):
    """A server of the Model Context Protocol, started by a command or reached at an address."""

    command: str | None = None  # program of a server that speaks over its standard input and output
    args: tuple[str, ...] = ()  # arguments of `command`
    env: dict[str, str] = Field(
        {}
    )  # environment variables of `command`; "" takes a secret from the driver's environment
    url: str | None = None  # address of a server that speaks streamable HTTP
    # "run": one connection of each process of the run, for all its episodes; "episode": one for each episode that calls
    # a tool of the server, closed at its end
    session: Literal["run", "episode"] = "run"
    start_timeout_s: float = Field(30.0, gt=0)  # time limit of the connection, and of the list of tools

    @field_validator("env", mode="before")
    @classmethod
    def variables_can_be_set(cls, given: Any) -> Any:
        return read_variables("rollout.tools.mcp_servers.NAME.env", given)

    @model_validator(mode="after")
    def it_can_be_reached(self) -> McpServerConfig:
        if (self.command is None) == (self.url is None):
            what = (
                "neither command nor url" if self.url is None else f"command = {self.command!r} and url = {self.url!r}"
            )
            raise ValueError(f"an MCP server with {what}: set one of the two")
        if self.url is not None and (self.args or self.env):
            raise ValueError(f"an MCP server with url = {self.url!r} takes no args and no env: remove them")
        return self


class ToolConfig(Section):
    """Tools that the policy calls in the form of its chat template. An answer without a call ends the episode."""

    # import paths (docs/extending.md) of Python functions with type hints and a docstring
    functions: tuple[str, ...] = ()
    mcp_servers: dict[str, McpServerConfig] = Field(default_factory=dict)  # name -> server whose tools are added
    timeout_s: float = Field(30.0, gt=0)  # time limit of one call, after which the policy is answered so
    max_result_chars: int = Field(10_000, ge=1)  # characters of a result; the rest is cut

    @property
    def given(self) -> bool:
        return bool(self.functions or self.mcp_servers)


class AgentConfig(Section):
    """An agent that plays the episodes by its own loop, over an endpoint that records what the policy answers."""

    # import path (docs/extending.md) of a coroutine function, called with (prompt, *, base_url, api_key, seed), which
    # returns the reward, or None
    function: str | None = None
    # a program and its arguments, started for each episode. "{prompt}" in an argument is the prompt's last message; its
    # standard input is the prompt as JSON
    command: tuple[str, ...] = ()
    env: dict[str, str] = Field({})  # environment variables of `command`, beside those of the endpoint
    timeout_s: float = Field(600.0, gt=0)  # time limit of an episode, which is discarded then

    @field_validator("env", mode="before")
    @classmethod
    def variables_can_be_set(cls, given: Any) -> Any:
        return read_variables("rollout.agent.env", given)

    @property
    def given(self) -> bool:
        return self.function is not None or bool(self.command)

    @model_validator(mode="after")
    def it_is_one_agent(self) -> AgentConfig:
        if self.function is not None and self.command:
            raise ValueError(
                f"rollout.agent.function = {self.function!r} and rollout.agent.command = {list(self.command)}: remove "
                "one of the two"
            )
        return self
