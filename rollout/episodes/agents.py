"""Episodes that an agent plays by its own loop, as a client of the recorder.

An agent that fails, does not end in time, or asks the policy nothing costs its episode, which is discarded with the
reason; an error of the engine ends the run, whatever the agent makes of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import secrets
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import SupportsFloat

from miles_like.limits.user_errors import raised, shown
from miles_like.protocols import EpisodeLog, RolloutEngine
from miles_like.types import EnvironmentLost, Prompt, Sample, SampleGroup, SamplingParams, Unscored
from rollout.chat.positions import same_until
from rollout.chat.turns import Chat
from rollout.concurrency import all_or_first_error
from rollout.episodes.environment_calls import reason_of
from rollout.episodes.resuming import EngineWrapper
from rollout.recorder.agents import AgentFn
from rollout.recorder.server import Recorder, new_key
from rollout.recorder.session import Session
from rollout.seeds import seed_of

TIMEOUT = "agent timeout"  # reasons of discarded episodes
SILENT = "agent without a request"


class AgentEpisodes(EngineWrapper):
    """A RolloutEngine whose samples are recorded episodes, of one row or several.

    engine: returns no aborted samples (`ResumingEngine`). max_tokens: of a row, beside as many as the prompt has.
    recorder: which other engines may share; `close` ends it.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        agent: AgentFn,
        chat: Chat,
        *,
        max_tokens: int,
        timeout_s: float,
        recorder: Recorder,
        log: EpisodeLog | None = None,
    ) -> None:
        super().__init__(engine)
        self._agent, self._chat = agent, chat
        self._max_tokens, self._timeout_s = max_tokens, timeout_s
        self._recorder, self._log = recorder, log

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` episodes of each prompt. A group's prompt has the tokens with which all its rows begin: an agent writes
        its own first messages. Raises RuntimeError naming the sample where the agent function fails."""
        return await all_or_first_error(map(partial(self._group, n=n, params=params), prompts))

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
            lost = await self._play(session, seed)
        except Exception as e:
            if session.failure is not None and session.failure is not e:
                raise session.failure from e  # what the agent has made of it
            raise
        finally:
            if self._log is not None:
                self._log.record(session.counts)
        if session.failure is not None:
            raise session.failure
        if lost is not None:
            return Unscored(reason=lost)
        return session.rows or Unscored(reason=SILENT)

    async def _play(self, session: Session, seed: int) -> str | None:
        """Sets the session's reward, if the agent returns one. Returns why the episode is lost, if it is."""
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with self._recorder.session(session) as url, limit:
                reward = await self._agent(session.prompt, base_url=url, api_key=session.key, seed=seed)
        except EnvironmentLost as e:
            return reason_of(e)
        except Exception as e:  # user code may raise anything
            if isinstance(e, TimeoutError) and limit.expired():
                return TIMEOUT
            raise RuntimeError(
                f"rollout.agent failed for sample {session.prompt.id}/{session.index}: {raised(e)}"
            ) from e
        if reward is not None:
            if not (isinstance(reward, SupportsFloat) and math.isfinite(reward)):
                raise RuntimeError(
                    f"rollout.agent returned {shown(reward)} for sample {session.prompt.id}/{session.index}: expected "
                    "a finite number, or None to have it scored"
                )
            session.reward = float(reward)
        return None


def with_common_start(prompt: Prompt, rows: Sequence[Sample]) -> Prompt:
    """The prompt with the tokens that all rows have in common before their first turns, at least one."""
    starts = [row.token_ids[: int(row.loss_mask.nonzero()[0])].tolist() for row in rows]
    if not starts:
        return prompt
    common = starts[0]
    for other in starts[1:]:
        common = common[: same_until(common, other)]
    return dataclasses.replace(prompt, token_ids=tuple(common or starts[0][:1]))
