"""A user's own way from a prompt to samples, held to what a sample must be before anybody trains on it.

Letters: G samples a prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from miles_like.protocols import GenerateFn, RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams
from miles_like.user_errors import raised, shown
from rollout.limited import Limited
from rollout.together import all_or_first_error
from rollout.unaborted import Around


class OwnGenerate(Around):
    """A RolloutEngine that asks `function` for the samples of each prompt, all prompts at the same time.

    engine: one whose samples have ended (`Unaborted`). max_tokens: of a sample, after its prompt. call_s: seconds that
    a prompt may take, the engine's work for it included.
    """

    def __init__(self, engine: RolloutEngine, function: GenerateFn, *, max_tokens: int, call_s: float = 1800.0) -> None:
        super().__init__(engine)
        self._function = function
        self._max_tokens = max_tokens
        self._limited = Limited(call_s)

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """Raises RuntimeError naming the prompt where the function fails or gives what cannot be trained on."""
        return await all_or_first_error(self._group(p, n, params) for p in prompts)

    async def _group(self, prompt: Prompt, n: int, params: SamplingParams) -> SampleGroup:
        try:
            samples = await self._limited.call(self._function, self._engine, prompt, n=n, params=params)
        except Exception as e:  # the user's code: whatever it raises, say what it was given
            raise RuntimeError(f"rollout.generate failed for prompt {prompt.id!r}: {raised(e)}") from e
        if not (isinstance(samples, Sequence) and all(isinstance(s, Sample) for s in samples)):
            raise RuntimeError(f"rollout.generate of prompt {prompt.id!r} gave {shown(samples)}: want {n} samples")
        wrong = self._wrong(prompt, samples, n)
        if wrong:
            raise RuntimeError(f"rollout.generate of prompt {prompt.id!r}: {wrong}")
        return SampleGroup(prompt=prompt, samples=tuple(sorted(samples, key=lambda s: s.index)))

    def _wrong(self, prompt: Prompt, samples: Sequence[Sample], n: int) -> str | None:
        """Why these are not its samples; None: they are."""
        names = [s.name for s in samples]
        if sorted(names) != sorted(f"{prompt.id}/{i}" for i in range(n)):
            return f"it gave samples {shown(names)}, want one of each index from 0 to {n - 1}"
        begin = list(prompt.token_ids)
        for s in samples:
            more = len(s.token_ids) - len(begin)
            if s.token_ids[: len(begin)].tolist() != begin or bool(s.loss_mask[: len(begin)].any()):
                return f"sample {s.name} does not begin with the prompt's tokens, none of them under loss"
            if more > self._max_tokens:
                return (
                    f"sample {s.name} has {more} tokens after its prompt, at most {self._max_tokens} fit: raise "
                    "rollout.max_episode_tokens (without it the limit is rollout.max_new_tokens)"
                )
            if s.finish is Finish.ABORT:
                return f"sample {s.name} was aborted: give its finish as STOP or LENGTH"
            if s.reward is not None and not math.isfinite(s.reward):
                return f"sample {s.name} has the reward {s.reward}: give a finite number, or None to have it scored"
            if s.response_len and not s.versions:
                return f"sample {s.name} has {s.response_len} tokens under loss and no weight versions"
        return None
