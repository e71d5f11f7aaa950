"""Episodes that an agent plays by its own loop, as a client of the recorder.

An agent that fails, does not end in time, or asks the policy nothing costs its episode, which is discarded with the
reason; an error of the engine ends the run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from miles_like.limits.user_errors import raised
from miles_like.plugins import load
from miles_like.protocols import RolloutEngine
from miles_like.types import EnvironmentLost, Prompt, Sample, SampleGroup, SamplingParams, Unscored
from miles_like.variables import inherited, is_secret
from rollout.chat.positions import same_until
from rollout.chat.turns import Chat
from rollout.concurrency import all_or_first_error
from rollout.episodes import agent_process
from rollout.episodes.resuming import EngineWrapper
from rollout.recorder.server import MODEL, Recorder, new_key
from rollout.recorder.session import Session
from rollout.seeds import seed_of
from rollout.tool_config import AgentConfig

_log = logging.getLogger(__name__)
TIMEOUT = "agent timeout"  # reasons of discarded episodes
SILENT = "agent without a request"
FAILED = "agent failed"
_TAIL = 2000  # bytes of an agent's error output that a warning has
_KILL_S = 5.0


class AgentFn(Protocol):
    """A user's agent: plays one episode as a client of `base_url`, which ends before /v1."""

    async def __call__(self, prompt: Prompt, *, base_url: str, api_key: str, seed: int) -> float | None:
        """The reward; None: the run's reward scores the episode. Raises EnvironmentLost to discard the episode; another
        exception ends the run."""


class AgentEpisodes(EngineWrapper):
    """A RolloutEngine whose samples are recorded episodes, of one row or several.

    engine: returns no aborted samples (`ResumingEngine`). max_tokens: of a row, beside as many as the prompt has.
    """

    def __init__(self, engine: RolloutEngine, agent: AgentFn, chat: Chat, *, max_tokens: int, timeout_s: float) -> None:
        super().__init__(engine)
        self._agent, self._chat = agent, chat
        self._max_tokens, self._timeout_s = max_tokens, timeout_s
        self._recorder = Recorder()
        self.counts: Counter[str] = Counter()  # of all sessions

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` episodes of each prompt. A group's prompt has the tokens with which all its rows begin: an agent writes
        its own first messages. Raises RuntimeError naming the sample where the agent function fails."""
        return await all_or_first_error(self._group(p, n, params) for p in prompts)

    async def close(self) -> None:
        await self._recorder.close()
        await self._engine.close()

    async def _group(self, prompt: Prompt, n: int, params: SamplingParams) -> SampleGroup:
        episodes = await all_or_first_error(self._episode(prompt, i, params) for i in range(n))
        rows = tuple(row for e in episodes if not isinstance(e, Unscored) for row in e)
        lost = Counter(e.reason for e in episodes if isinstance(e, Unscored))
        return SampleGroup(prompt=with_common_start(prompt, rows), samples=rows, discarded=dict(lost))

    async def _episode(self, prompt: Prompt, index: int, params: SamplingParams) -> Sequence[Sample] | Unscored:
        key, seed = new_key(), seed_of(params.sampling_seed or 0, f"agent {prompt.id}", index)
        session = Session(
            id=secrets.token_hex(8),
            key=key,
            prompt=prompt,
            index=index,
            engine=self._engine,
            chat=self._chat,
            params=params,
            most_tokens=len(prompt.token_ids) + self._max_tokens,
        )
        try:
            async with self._recorder.session(session) as url, asyncio.timeout(self._timeout_s) as limit:
                reward = await self._agent(prompt, base_url=url, api_key=key, seed=seed)
        except TimeoutError:
            if not limit.expired():
                raise
            return Unscored(reason=TIMEOUT)
        except EnvironmentLost as e:
            return Unscored(reason=str(e)[:100] or FAILED)
        except Exception as e:  # user code may raise anything
            raise RuntimeError(f"rollout.agent failed for sample {prompt.id}/{index}: {raised(e)}") from e
        finally:
            self.counts += session.counts
        if session.failure is not None:
            raise session.failure
        if reward is not None:
            session.reward = float(reward)
        return session.rows or Unscored(reason=SILENT)


def with_common_start(prompt: Prompt, rows: Sequence[Sample]) -> Prompt:
    """The prompt with the tokens that all rows have in common before their first turns, at least one."""
    starts = [row.token_ids[: int(row.loss_mask.nonzero()[0])].tolist() for row in rows]
    if not starts:
        return prompt
    common = starts[0]
    for other in starts[1:]:
        common = common[: same_until(common, other)]
    return dataclasses.replace(prompt, token_ids=tuple(common or starts[0][:1]))


class AgentCommand:
    """Protocol: AgentFn. A program, started for each episode in a process group of its own, which ends with it and with
    the run. It finds the endpoint in the variables that OpenAI's and Anthropic's clients read; its reward is the one
    that it posts to the endpoint, if any."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config

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
        here = inherited()
        own = {k: here.get(k, "") if is_secret(k) and not v else v for k, v in self._config.env.items()}
        return {
            **here,
            **own,
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
