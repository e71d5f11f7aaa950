"""Agents that play one episode: a function of this process, or a program that is started for it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from miles_like.plugins import load
from miles_like.types import EnvironmentLost, Prompt
from miles_like.variables import filled, inherited, is_secret
from rollout.recorder import agent_process
from rollout.recorder.server import MODEL
from rollout.tool_config import AgentConfig

_log = logging.getLogger(__name__)
FAILED = "agent failed"  # reason of a discarded episode
_TAIL = 2000  # bytes of an agent's error output that a warning has
_KILL_S = 5.0


class AgentFn(Protocol):
    """A user's agent: plays one episode as a client of `base_url`, which ends before /v1."""

    async def __call__(self, prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> float | None:
        """The reward; None: the run's reward scores the episode. Raises EnvironmentLost to discard the episode; another
        exception ends the run."""


class AgentCommand:
    """Protocol: AgentFn. A program, started for each episode in a new process group, which ends with it and with the
    run. It finds the endpoint in the variables that OpenAI's and Anthropic's clients read; its reward is the one
    that it posts to the endpoint, if any."""

    def __init__(self, config: AgentConfig) -> None:
        """Raises ValueError for a secret of `env` that this process does not have."""
        self._config, self._env = config, filled("rollout.agent.env", config.env)

    async def __call__(self, prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> float | None:
        text = str(prompt.messages[-1]["content"]) if prompt.messages else prompt.text
        words = [word.replace("{prompt}", text) for word in self._config.command]
        given = {
            "id": prompt.id,
            "text": text,
            "messages": list(prompt.messages),
            "meta": dict(prompt.meta),
            "seed": seed,
        }
        with tempfile.TemporaryFile() as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", agent_process.__file__, str(os.getpid()), *words),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=errors,
                env=self._variables(base_url, api_key),
                start_new_session=True,
            )
            try:
                await process.communicate(json.dumps(given).encode())
            finally:
                await _end_group(process)
            if process.returncode:
                errors.seek(max(0, errors.seek(0, os.SEEK_END) - _TAIL))
                tail = " ".join(errors.read().decode("utf-8", "replace").split())
                _log.warning("the agent of prompt %s ended with status %s: %s", prompt.id, process.returncode, tail)
                raise EnvironmentLost(FAILED)
        return None

    def _variables(self, base_url: str, api_key: str) -> dict[str, str]:
        """Those of this process, without its secrets: an agent does what a model writes."""
        return {
            **{name: value for name, value in inherited().items() if not is_secret(name)},
            **self._env,
            "OPENAI_BASE_URL": f"{base_url}/v1",
            "OPENAI_API_KEY": api_key,
            "OPENAI_MODEL": MODEL,
            "MILES_LIKE_REWARD_URL": f"{base_url}/reward",
            "ANTHROPIC_BASE_URL": base_url,
            "ANTHROPIC_API_KEY": api_key,
        }


async def _end_group(process: Any) -> None:
    """All processes of the group, of which the first may have left some."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(TimeoutError):
        async with asyncio.timeout(_KILL_S):
            await process.wait()


def load_agent(config: AgentConfig) -> AgentFn:
    """Raises ValueError for an import path, or a program, that cannot be used."""
    if config.function is not None:
        found: AgentFn = load(config.function, AgentFn, key="rollout.agent.function")
        return found
    program = config.command[0]
    if shutil.which(program) is None:
        raise ValueError(
            f"rollout.agent.command: the program {program!r} was not found: install it, or give its path, which starts "
            f"with ./ relative to the configuration file ({Path.cwd()} is the working directory)"
        )
    return AgentCommand(config)
