"""Episodes of several turns: the policy and an environment take turns until the environment ends the episode.

The environment's tokens are part of the sample and never loss tokens. Log-probs, routes and weight versions of each
turn stay as they were sampled (`continue_sample`). A sample's spans are the turns and the answers, with their rewards
and their seconds.

Letters: G samples a prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from miles_like.protocols import Environment, EpisodeLog, MakeEnvironment
from miles_like.types import (
    ENVIRONMENT,
    POLICY,
    EnvironmentLost,
    Finish,
    Message,
    Observation,
    Prompt,
    Sample,
    SampleGroup,
    SamplingParams,
    Span,
    Unscored,
)
from rollout.chat.messages import outcomes
from rollout.concurrency import all_or_first_error
from rollout.episodes.environment_calls import EnvironmentCalls, reason_of
from rollout.episodes.groups import with_outcomes
from rollout.episodes.replay import KeptEpisode
from rollout.episodes.resuming import EngineWrapper, ResumingEngine
from rollout.seeds import seed_of

TIMEOUT = "episode timeout"  # reason of a discarded episode


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLimits:
    """An episode that reaches a limit of turns or tokens ends with Finish.LENGTH, as a sample does at the token limit;
    one that exceeds `episode_s` or `environment_s` is discarded."""

    max_turns: int  # turns of the policy
    max_tokens: int  # after the prompt, the policy's and the environment's
    call_s: float = 1800.0  # time limit in seconds for creating the environment and for each of its answers
    environment_s: float | None = None  # takes the place of `call_s`
    episode_s: float | None = None  # from the end of the first turn; None: no limit
    threads: int = 1  # environments without async that are called at once

    def __post_init__(self) -> None:
        assert self.max_turns > 0 and self.max_tokens > 0


class ChatFormat(Protocol):
    """Chat messages as tokens. Spans are counted from the first of the tokens that they are in."""

    def render(self, sample: Sample, messages: Sequence[Message]) -> tuple[Sequence[int], Sequence[Span]]:
        """The tokens that follow the last turn of `sample` for `messages`, up to where the policy's next turn begins,
        and what is in them."""

    def parse(self, sample: Sample) -> Sequence[Span]:
        """What is in the last turn of `sample`: reasoning, tool calls."""


class Episodes(EngineWrapper):
    """A RolloutEngine whose samples are whole episodes.

    encode: an environment's text -> token ids. decode: a turn's tokens -> text. chat: None where no environment answers
    by messages. clock: seconds, for the spans. log: counts what is replayed. Each episode has a separate environment,
    made with a seed derived from the sampling seed, the prompt and the sample's index. If that is the environment's
    only source of randomness, episodes are independent.

    A sample that the engine returns with spans comes from a checkpoint: a new environment gets its turns again, and
    the episode goes on where it was, or from the first answer that is another one.
    """

    def __init__(
        self,
        engine: ResumingEngine,
        make: MakeEnvironment,
        limits: EpisodeLimits,
        *,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        chat: ChatFormat | None = None,
        clock: Callable[[], float] = time.perf_counter,
        log: EpisodeLog | None = None,
    ) -> None:
        super().__init__(engine)
        self._resuming, self._log = engine, log
        self._limits = limits
        self._calls = EnvironmentCalls(
            make, call_s=limits.call_s, environment_s=limits.environment_s, threads=limits.threads
        )
        self._encode, self._decode, self._chat, self._clock = encode, decode, chat, clock

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """`n` episodes of each prompt; `params.max_new_tokens` limits a turn. A sample has the sum of the rewards that
        its environment gave, if any. Episodes that exceed a time limit, or lose their environment, are discarded.
        Raises RuntimeError naming prompt and sample if the environment fails, and ValueError for messages without a
        chat format."""
        began = self._clock()
        groups = await self._engine.generate(prompts, n=n, params=self._turn_params(params, 0))
        seconds = self._clock() - began
        episodes = [self._run(g.prompt, s, params, seconds) for g in groups for s in g.samples]
        done = iter(await all_or_first_error(episodes))
        return [with_outcomes(g, [next(done) for _ in g.samples]) for g in groups]

    async def _run(self, prompt: Prompt, sample: Sample, params: SamplingParams, seconds: float) -> Sample | Unscored:
        """`sample` has the first turn, which took `seconds`; play the turns that follow."""
        seed = seed_of(params.sampling_seed or 0, f"environment {prompt.id}", sample.index)
        try:
            async with asyncio.timeout(self._limits.episode_s) as limit:
                environment = await self._calls.make(prompt, seed=seed)
                try:
                    played = await self._play(environment, prompt, sample, params, seconds)
                    if not limit.expired():
                        limit.reschedule(None)  # a whole episode stays, however long its environment takes to close
                    return played
                finally:
                    await self._calls.close(environment, sample.name)
        except TimeoutError:
            if not limit.expired():
                raise
            return Unscored(reason=TIMEOUT)
        except EnvironmentLost as e:
            return Unscored(reason=reason_of(e))

    async def _play(
        self, environment: Environment, prompt: Prompt, sample: Sample, params: SamplingParams, seconds: float
    ) -> Sample:
        start, kept = len(prompt.token_ids), KeptEpisode.of(sample)
        for turn in range(1, self._limits.max_turns + 1):
            sample = self._with_turn(sample, start, seconds) if kept is None else kept.after(turn, self._decode)
            if sample.finish is not Finish.STOP:
                return _rewarded(sample)  # the turn was cut off at the token limit
            began = self._clock()
            answer = await self._calls.answer(environment, sample, self._decode(sample.token_ids[start:].tolist()))
            seconds = self._clock() - began
            tokens, inner = ((), ()) if answer.ends else self._tokens(sample, answer)
            if kept is not None and not kept.repeats(turn, answer, tokens):
                kept = None
                self._count(again=True)
            used = sample.length + len(tokens) - len(prompt.token_ids)
            if answer.ends or turn == self._limits.max_turns or used >= self._limits.max_tokens:
                sample = _answered(sample, answer, 0, seconds)
                return _rewarded(sample if answer.ends else dataclasses.replace(sample, finish=Finish.LENGTH))
            sample, start = _answered(sample, answer, len(tokens), seconds, inner), sample.length + len(tokens)
            if kept is not None and turn < len(kept.turns):
                continue
            began, limited = self._clock(), self._turn_params(params, used)
            if kept is None:
                sample = await self._engine.continue_sample(sample, tokens, params=limited)
            else:
                sample, kept = await self._resumed(kept.sample, start, tokens, limited), None
                self._count(again=False)
            seconds = self._clock() - began
        raise AssertionError("the last turn returns")

    async def _resumed(self, kept: Sample, start: int, tokens: Sequence[int], params: SamplingParams) -> Sample:
        """`kept` with its turn from `start` on, which follows the environment's `tokens`; aborted, if it had not
        begun."""
        before = int(kept.loss_mask[:start].sum())
        return await self._resuming.resume_turn(kept, params, sampled_before=before, environment=tokens)

    def _count(self, *, again: bool) -> None:
        if self._log is not None:
            self._log.replay(again=again)

    def _turn_params(self, params: SamplingParams, used: int) -> SamplingParams:
        """`params` with the token limit of a turn that follows `used` tokens of the episode."""
        return dataclasses.replace(params, max_new_tokens=min(params.max_new_tokens, self._limits.max_tokens - used))

    def _tokens(self, sample: Sample, answer: Observation) -> tuple[Sequence[int], Sequence[Span]]:
        """Of an answer, and what is in them. Raises ValueError for messages without a chat format."""
        if not answer.messages:
            return answer.token_ids or tuple(self._encode(answer.text)), ()
        if self._chat is None:
            raise ValueError(
                f"the environment of sample {sample.name} answered with {len(answer.messages)} messages, and no chat "
                "format is known that gives them token ids: set rollout.renderer = 'auto', or return text or token_ids"
            )
        return self._chat.render(sample, answer.messages)

    def _with_turn(self, sample: Sample, start: int, seconds: float) -> Sample:
        """With the spans of the policy's turn from `start` on."""
        status = "" if sample.finish is Finish.STOP else sample.finish.value
        turn = Span(who=POLICY, start=start, end=sample.length, status=status, seconds=seconds)
        inner = () if self._chat is None else _moved(self._chat.parse(sample), start)
        return dataclasses.replace(sample, spans=(*sample.spans, turn, *inner))


def _answered(sample: Sample, answer: Observation, tokens: int, seconds: float, inner: Sequence[Span] = ()) -> Sample:
    """With the reward of the last turn and the span of its answer, whose `tokens` follow."""
    at = max(i for i, s in enumerate(sample.spans) if s.who == POLICY and s.what == "turn")
    spans = [*sample.spans[: at + 1], *outcomes(sample.spans[at + 1 :], answer.messages)]
    spans[at] = dataclasses.replace(spans[at], reward=answer.reward)
    end = sample.length
    spans.append(Span(who=ENVIRONMENT, start=end, end=end + tokens, seconds=seconds))
    return dataclasses.replace(sample, spans=(*spans, *_moved(inner, end)))


def _moved(spans: Sequence[Span], by: int) -> list[Span]:
    return [dataclasses.replace(s, start=s.start + by, end=s.end + by) for s in spans]


def _rewarded(sample: Sample) -> Sample:
    """With the sum of the rewards of its turns, if any has one."""
    given = [s.reward for s in sample.spans if s.reward is not None]
    return dataclasses.replace(sample, reward=math.fsum(given) if given else None)
