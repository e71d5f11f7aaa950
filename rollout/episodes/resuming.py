"""Resume aborted samples until they end.

A sample may be resumed on another engine and under newer weights. With the same seed and weights the result equals an
uninterrupted sample.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from miles_like.protocols import RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error

# A sample aborted this many times in a row without a new token means that the server aborts everything. Aborts after
# which there are new tokens do not count: there cannot be more of them than tokens.
RESUMES = 3


class EngineWrapper:
    """A RolloutEngine that forwards all calls to another one. Subclasses change how samples are made."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        return await self._engine.generate(prompts, n=n, params=params)

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        return await self._engine.continue_sample(sample, environment, params=params)

    async def abort_all(self) -> None:
        await self._engine.abort_all()

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def weight_version(self) -> int:
        return await self._engine.weight_version()

    async def close(self) -> None:
        await self._engine.close()


class ResumingEngine(EngineWrapper):
    """Returns no aborted samples: each call is a complete turn."""

    def __init__(self, engine: RolloutEngine, resumes: int = RESUMES) -> None:
        super().__init__(engine)
        self._resumes = resumes

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """A sample with spans comes from a checkpoint, in a later turn, and is returned as it is, for
        `resume_turn`. Raises RuntimeError as `resume_until_ended`."""
        groups = await self._engine.generate(prompts, n=n, params=params)
        done = iter(await all_or_first_error(self._first_turn(s, params) for g in groups for s in g.samples))
        return [dataclasses.replace(g, samples=tuple(next(done) for _ in g.samples)) for g in groups]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """Raises RuntimeError as `resume_until_ended`."""
        turn = await self._engine.continue_sample(sample, environment, params=params)
        return await self.resume_turn(turn, params, sampled_before=sample.response_len, environment=environment)

    async def _first_turn(self, sample: Sample, params: SamplingParams) -> Sample:
        return sample if sample.spans else await self.resume_turn(sample, params)

    async def resume_turn(
        self, sample: Sample, params: SamplingParams, *, sampled_before: int = 0, environment: Sequence[int] = ()
    ) -> Sample:
        """As `resume_until_ended`."""
        return await resume_until_ended(
            self._engine,
            sample,
            params=params,
            resumes=self._resumes,
            sampled_before=sampled_before,
            environment=environment,
        )


class ChatEngine(ResumingEngine):
    """A ResumingEngine whose samples end at a chat model's turn ends too, which may be other tokens than the end of its
    text. close_tools: called when the engine is closed."""

    def __init__(
        self,
        engine: RolloutEngine,
        resumes: int,
        stop_token_ids: Sequence[int],
        close_tools: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(engine, resumes)
        self._stops, self._close_tools = tuple(stop_token_ids), close_tools

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        return await super().generate(prompts, n=n, params=self._params(params))

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        return await super().continue_sample(sample, environment, params=self._params(params))

    async def resume_turn(
        self, sample: Sample, params: SamplingParams, *, sampled_before: int = 0, environment: Sequence[int] = ()
    ) -> Sample:
        more = self._params(params)
        return await super().resume_turn(sample, more, sampled_before=sampled_before, environment=environment)

    async def close(self) -> None:
        if self._close_tools is not None:
            await self._close_tools()
        await super().close()

    def _params(self, params: SamplingParams) -> SamplingParams:
        stops = tuple(dict.fromkeys((*params.stop_token_ids, *self._stops)))
        return dataclasses.replace(params, stop_token_ids=stops)


async def resume_until_ended(
    engine: RolloutEngine,
    sample: Sample,
    *,
    params: SamplingParams,
    resumes: int,
    sampled_before: int = 0,
    environment: Sequence[int] = (),
) -> Sample:
    """Continue `sample` until its current turn, which has the limits of `params`, ends with STOP or LENGTH.

    sampled_before: the number of tokens sampled in earlier turns. environment: the environment's tokens before this
    turn, which a turn that was aborted before its first sampled token does not contain yet. Raises RuntimeError when
    the sample was continued `resumes` times in a row and aborted each time without a new token: the tokens were cut
    off, not chosen by the policy, so a reward for them would be wrong.
    """
    stalled = 0
    while (sample := _actual_finish(sample, params, sampled_before)).finish is Finish.ABORT:
        if stalled == resumes:
            raise RuntimeError(
                f"sample {sample.name} was continued {resumes} times, and aborted each time before a new token: a "
                "client of the server aborts it; see the server's log for the sender of /abort_request"
            )
        new = sample.response_len - sampled_before
        left = dataclasses.replace(params, max_new_tokens=params.max_new_tokens - new)
        sample = await engine.continue_sample(sample, () if new else environment, params=left)
        stalled = stalled + 1 if sample.response_len - sampled_before == new else 0
    return sample


def _actual_finish(sample: Sample, params: SamplingParams, sampled_before: int) -> Sample:
    """Correct the finish reason: a stock server reports an abort even if the last token came in the same step."""
    new = sample.response_len - sampled_before
    if sample.finish is not Finish.ABORT or not new:
        return sample
    if int(sample.token_ids[-1]) in params.stop_token_ids:
        return dataclasses.replace(sample, finish=Finish.STOP)
    return dataclasses.replace(sample, finish=Finish.LENGTH) if new >= params.max_new_tokens else sample
