"""Episodes of several turns: the policy and an environment take turns until the environment ends the episode.

The environment's tokens are part of the sample and never loss tokens. Log-probs, routes and weight versions of each
turn stay as they were sampled (`continue_sample`).

Letters: G samples a prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miles_like.limits.user_errors import raised, shown
from miles_like.protocols import Environment, MakeEnvironment, RolloutEngine
from miles_like.types import Finish, Observation, Prompt, Sample, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error
from rollout.episodes.resuming import EngineWrapper
from rollout.episodes.time_limits import TimeLimitedCalls
from rollout.seeds import seed_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """An episode that reaches a limit ends with Finish.LENGTH, as a sample does at the token limit."""

    max_turns: int  # turns of the policy
    max_tokens: int  # after the prompt, the policy's and the environment's
    call_s: float = 1800.0  # time limit in seconds for creating the environment and for each of its answers

    def __post_init__(self) -> None:
        assert self.max_turns > 0 and self.max_tokens > 0


class Episodes(EngineWrapper):
    """A RolloutEngine whose samples are whole episodes.

    engine: returns no aborted samples (`ResumingEngine`). encode: an environment's text -> token ids. decode: a turn's
    tokens -> text. Each episode has a separate environment, made with a seed derived from the sampling seed, the prompt
    and the sample's index. If that is the environment's only source of randomness, episodes are independent.
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
        self._calls = TimeLimitedCalls(limits.call_s)
        self._encode = encode
        self._decode = decode

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` episodes of each prompt; `params.max_new_tokens` limits a turn. A sample has the reward that its
        environment returned, if any. Raises RuntimeError naming prompt and sample if the environment fails."""
        groups = await self._engine.generate(prompts, n=n, params=self._turn_params(params, 0))
        done = iter(await all_or_first_error(self._run_episode(g.prompt, s, params) for g in groups for s in g.samples))
        return [dataclasses.replace(g, samples=tuple(next(done) for _ in g.samples)) for g in groups]

    async def _run_episode(self, prompt: Prompt, sample: Sample, params: SamplingParams) -> Sample:
        """`sample` has the first turn; run the turns that follow."""
        environment = await self._make_environment(prompt, sample.index, params)
        turn_start = prompt_len = len(prompt.token_ids)
        for turn in range(self._limits.max_turns):
            if sample.finish is not Finish.STOP:
                return sample  # the turn was cut off at the token limit
            answer = await self._answer(environment, sample, self._decode(sample.token_ids[turn_start:].tolist()))
            if answer.ends:
                return dataclasses.replace(sample, reward=answer.reward)
            tokens = answer.token_ids or tuple(self._encode(answer.text))
            used = len(sample.token_ids) + len(tokens) - prompt_len
            if turn + 1 == self._limits.max_turns or used >= self._limits.max_tokens:
                break
            turn_start = len(sample.token_ids) + len(tokens)
            sample = await self._engine.continue_sample(sample, tokens, params=self._turn_params(params, used))
        return dataclasses.replace(sample, finish=Finish.LENGTH)

    def _turn_params(self, params: SamplingParams, used: int) -> SamplingParams:
        """`params` with the token limit of a turn that follows `used` tokens of the episode."""
        return dataclasses.replace(params, max_new_tokens=min(params.max_new_tokens, self._limits.max_tokens - used))

    async def _make_environment(self, prompt: Prompt, index: int, params: SamplingParams) -> Environment:
        seed = seed_of(params.sampling_seed or 0, f"environment {prompt.id}", index)
        try:
            environment: Environment = await self._calls.call(self._make, prompt, seed=seed)
            return environment
        except Exception as e:  # user code may raise anything
            raise RuntimeError(f"cannot create the environment of prompt {prompt.id!r}: {raised(e)}") from e

    async def _answer(self, environment: Environment, sample: Sample, turn: str) -> Observation:
        try:
            answer = await self._calls.call(environment, sample, turn)
        except Exception as e:  # user code may raise anything
            raise RuntimeError(
                f"the environment of sample {sample.name} failed: {raised(e)}; the policy's turn was {turn[:200]!r}"
            ) from e
        if not isinstance(answer, Observation):
            raise RuntimeError(
                f"the environment of sample {sample.name} returned {shown(answer)}: expected an Observation"
            )
        return answer
