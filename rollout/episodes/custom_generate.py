"""Samples made by a user's generate function, checked before they are trained on.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from miles_like.limits.user_errors import raised, shown
from miles_like.protocols import GenerateFn, RolloutEngine
from miles_like.types import EnvironmentLost, Finish, Prompt, Sample, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error
from rollout.episodes.environment_calls import reason_of
from rollout.episodes.resuming import EngineWrapper
from rollout.episodes.rows import SampledTokens, numbered
from rollout.episodes.time_limits import TimeLimitedCalls


class CustomGenerate(EngineWrapper):
    """A RolloutEngine that calls `function` for the samples of each prompt, for all prompts concurrently.

    engine: returns no aborted samples (`ResumingEngine`). max_tokens: limit on a sample's tokens after the prompt.
    call_s: time limit per prompt in seconds, which includes the engine's work for it.
    """

    def __init__(self, engine: RolloutEngine, function: GenerateFn, *, max_tokens: int, call_s: float = 1800.0) -> None:
        super().__init__(engine)
        self._function = function
        self._max_tokens = max_tokens
        self._calls = TimeLimitedCalls(call_s)

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """Raises RuntimeError naming the prompt if the function fails or returns unusable samples."""
        return await all_or_first_error(self._group(p, n, params) for p in prompts)

    async def _group(self, prompt: Prompt, n: int, params: SamplingParams) -> SampleGroup:
        engine = SampledTokens(self._engine)
        try:
            found = await self._calls.call(self._function, engine, prompt, n=n, params=params)
        except EnvironmentLost as e:
            return SampleGroup(prompt=prompt, samples=(), discarded={reason_of(e): n})
        except Exception as e:  # user code may raise anything
            raise RuntimeError(f"rollout.generate failed for prompt {prompt.id!r}: {raised(e)}") from e
        if not _are_samples(found):
            raise RuntimeError(
                f"rollout.generate of prompt {prompt.id!r} returned {shown(found)}: expected {n} samples"
            )
        episodes = numbered(found)
        problem = self._problem(prompt, episodes, n) or _problem_of_rows(episodes, engine)
        if problem:
            raise RuntimeError(f"rollout.generate of prompt {prompt.id!r}: {problem}")
        ordered = sorted(episodes, key=lambda rows: rows[0].index)
        return SampleGroup(prompt=prompt, samples=tuple(s for rows in ordered for s in rows))

    def _problem(self, prompt: Prompt, episodes: Sequence[Sequence[Sample]], n: int) -> str | None:
        """Why these samples cannot be trained on; None if they can."""
        names = [rows[0].name for rows in episodes]
        if sorted(names) != sorted(f"{prompt.id}/{i}" for i in range(n)):
            return f"it returned samples {shown(names)}, expected one for each index from 0 to {n - 1}"
        return next((why for rows in episodes for s in rows if (why := self._problem_of(prompt, s))), None)

    def _problem_of(self, prompt: Prompt, s: Sample) -> str | None:
        start = [] if s.row else list(prompt.token_ids)  # a further row may have another prompt
        more = s.length - len(prompt.token_ids)
        if s.token_ids[: len(start)].tolist() != start or bool(s.loss_mask[: len(start)].any()):
            return f"sample {s.name} must begin with the prompt's tokens, with a loss mask of false"
        if more > self._max_tokens:
            return (
                f"sample {s.name} has {more} tokens after its prompt, but the limit is {self._max_tokens}: "
                "raise rollout.max_episode_tokens (if it is not set, rollout.max_new_tokens is the limit)"
            )
        if s.finish is Finish.ABORT:
            return f"sample {s.name} is aborted: set its finish to STOP or LENGTH"
        if s.reward is not None and not math.isfinite(s.reward):
            return f"sample {s.name} has the reward {s.reward}: set a finite number, or None to have it scored"
        if s.response_len and not s.versions:
            return (
                f"sample {s.name} has {s.response_len} loss tokens but no weight versions: keep the versions "
                "of the server's replies"
            )
        if wrong := next((x for x in s.spans if not 0 <= x.start <= x.end <= s.length), None):
            return f"sample {s.name} has {s.length} tokens, but a span from {wrong.start} to {wrong.end}"
        return None


def _are_samples(found: Any) -> bool:
    """Samples, or rows of episodes."""
    if not isinstance(found, Sequence):
        return False
    rows = [one for one in found if not isinstance(one, Sample)]
    return all(isinstance(of, Sequence) and of and all(isinstance(s, Sample) for s in of) for of in rows)


def _problem_of_rows(episodes: Sequence[Sequence[Sample]], engine: SampledTokens) -> str | None:
    """Why episodes of several rows cannot be trained on; None if they can, or if there are none."""
    for rows in episodes:
        of, rewards = {(s.prompt_id, s.index) for s in rows}, {s.reward for s in rows}
        if len(of) > 1:
            return f"the {len(rows)} rows of episode {rows[0].name} are of {len(of)} samples: give them one index"
        if len(rewards) > 1:
            return (
                f"the {len(rows)} rows of episode {rows[0].name} have the rewards {sorted(map(str, rewards))}: set one"
            )
    if all(len(rows) == 1 for rows in episodes):
        return None
    if more := engine.more_often([s for rows in episodes for s in rows]):
        which = next(rows[0].name for rows in episodes if len(rows) > 1)
        return (
            f"{more} tokens are under loss more often than they were sampled, with rows as those of episode {which}: "
            "set the loss mask of tokens that another row has under loss to false"
        )
    return None
