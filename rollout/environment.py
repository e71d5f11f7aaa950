"""Episodes of several turns: the policy speaks, the environment answers, until it says that the episode is over.

Every token that the environment gave is fed and never under loss. Log-probs, routes and weight versions of each turn
stay as they were sampled (`continue_sample`).

Letters: G samples a prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_like.protocols import Environment, MakeEnvironment, RolloutEngine
from miles_like.types import Finish, Observation, Prompt, Sample, SampleGroup, SamplingParams
from miles_like.user_errors import raised, shown
from rollout.client import seed_of
from rollout.limited import Limited
from rollout.together import all_or_first_error
from rollout.unaborted import Around


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """An episode that reaches one of them is cut: it ends as a sample does at the token limit, Finish.LENGTH."""

    max_turns: int  # how often the policy speaks
    max_tokens: int  # after the prompt: the policy's and the environment's
    call_s: float = 1800.0  # that the environment may take to begin, and for each answer

    def __post_init__(self) -> None:
        assert self.max_turns > 0 and self.max_tokens > 0


class Episodes(Around):
    """A RolloutEngine whose samples are whole episodes.

    engine: one whose samples have ended (`Unaborted`). encode, decode: an environment's text -> token ids, a turn's
    tokens -> text. Each episode has an environment of its own, made with a seed of the sampling seed, the prompt and
    the sample's index: with an environment that draws from this alone, an episode does not depend on the others.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        make: MakeEnvironment,
        limits: EpisodeLimits,
        *,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        super().__init__(engine)
        self._make = make
        self._limits = limits
        self._limited = Limited(limits.call_s)
        self._encode = encode
        self._decode = decode

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` episodes of each prompt; `params.max_new_tokens` is of a turn. A sample has a reward where its
        environment gave it one. Raises RuntimeError naming prompt and sample where the environment fails."""
        groups = await self._engine.generate(prompts, n=n, params=self._of_turn(params, 0))
        done = iter(await all_or_first_error(self._played(g.prompt, s, params) for g in groups for s in g.samples))
        return [dataclasses.replace(g, samples=tuple(next(done) for _ in g.samples)) for g in groups]

    async def _played(self, prompt: Prompt, sample: Sample, params: SamplingParams) -> Sample:
        """From the first turn to the end."""
        environment = await self._begun(prompt, sample.index, params)
        before = begin = len(prompt.token_ids)
        for turn in range(self._limits.max_turns):
            if sample.finish is not Finish.STOP:
                return sample  # cut off in its turn: there is nothing whole to answer
            seen = await self._answer(environment, sample, self._decode(sample.token_ids[before:].tolist()))
            if seen.ends:
                return dataclasses.replace(sample, reward=seen.reward)
            fed = seen.token_ids or tuple(self._encode(seen.text))
            used = len(sample.token_ids) + len(fed) - begin
            if turn + 1 == self._limits.max_turns or used >= self._limits.max_tokens:
                break
            before = len(sample.token_ids) + len(fed)
            sample = await self._engine.continue_sample(sample, fed, params=self._of_turn(params, used))
        return dataclasses.replace(sample, finish=Finish.LENGTH)

    def _of_turn(self, params: SamplingParams, used: int) -> SamplingParams:
        """What a turn may take after `used` tokens of the episode."""
        return dataclasses.replace(params, max_new_tokens=min(params.max_new_tokens, self._limits.max_tokens - used))

    async def _begun(self, prompt: Prompt, index: int, params: SamplingParams) -> Environment:
        seed = seed_of(params.sampling_seed or 0, f"environment {prompt.id}", index)
        try:
            begun: Environment = await self._limited.call(self._make, prompt, seed=seed)
            return begun
        except Exception as e:  # the user's code: whatever it raises, say what it was given
            raise RuntimeError(f"no environment for prompt {prompt.id!r}: {raised(e)}") from e

    async def _answer(self, environment: Environment, sample: Sample, said: str) -> Observation:
        try:
            seen = await self._limited.call(environment, sample, said)
        except Exception as e:  # as above
            raise RuntimeError(
                f"the environment of sample {sample.name} failed: {raised(e)}; it was told {said[:200]!r}"
            ) from e
        if not isinstance(seen, Observation):
            raise RuntimeError(f"the environment of sample {sample.name} answered {shown(seen)}: want an Observation")
        return seen
