"""Samples made by a user's generate function, checked before they are trained on.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_like.limits.user_errors import raised, shown
from miles_like.protocols import GenerateFn, RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error
from rollout.episodes.resuming import EngineWrapper
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
        try:
            samples = await self._calls.call(self._function, self._engine, prompt, n=n, params=params)
        except Exception as e:  # user code may raise anything
            raise RuntimeError(f"rollout.generate failed for prompt {prompt.id!r}: {raised(e)}") from e
        if not (isinstance(samples, Sequence) and all(isinstance(s, Sample) for s in samples)):
            raise RuntimeError(
                f"rollout.generate of prompt {prompt.id!r} returned {shown(samples)}: expected {n} samples"
            )
        problem = self._problem(prompt, samples, n)
        if problem:
            raise RuntimeError(f"rollout.generate of prompt {prompt.id!r}: {problem}")
        return SampleGroup(prompt=prompt, samples=tuple(sorted(samples, key=lambda s: s.index)))

    def _problem(self, prompt: Prompt, samples: Sequence[Sample], n: int) -> str | None:
        """Why these samples cannot be trained on; None if they can."""
        names = [s.name for s in samples]
        if sorted(names) != sorted(f"{prompt.id}/{i}" for i in range(n)):
            return f"it returned samples {shown(names)}, expected one for each index from 0 to {n - 1}"
        start = list(prompt.token_ids)
        for s in samples:
            more = len(s.token_ids) - len(start)
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
        return None
