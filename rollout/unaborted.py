"""An engine whose samples have ended by themselves: one that comes back aborted goes on, on any engine and under
whatever weights it serves by then. With the same seed and weights it is the sample that was never aborted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from miles_like.protocols import RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams
from rollout.together import all_or_first_error

# A sample that goes on in vain still more often than anybody had a reason to abort it is on a server that ends all it
# is given. Aborts after which there are tokens more do not count: there are no more of them than tokens.
RESUMES = 3


class Around:
    """A RolloutEngine on another one; who inherits from it changes how samples are made."""

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


class Unaborted(Around):
    """For who plays episodes on it: each call is a turn that is whole when it returns."""

    def __init__(self, engine: RolloutEngine, resumes: int = RESUMES) -> None:
        super().__init__(engine)
        self._resumes = resumes

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """As the engine's. Raises RuntimeError naming a sample that goes on in vain (`ended`)."""
        groups = await self._engine.generate(prompts, n=n, params=params)
        done = iter(await all_or_first_error(self._whole(s, params) for g in groups for s in g.samples))
        return [dataclasses.replace(g, samples=tuple(next(done) for _ in g.samples)) for g in groups]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """As the engine's. Raises RuntimeError naming a sample that goes on in vain (`ended`)."""
        turn = await self._engine.continue_sample(sample, environment, params=params)
        return await self._whole(turn, params, said=sample.response_len, fed=environment)

    async def _whole(self, sample: Sample, params: SamplingParams, *, said: int = 0, fed: Sequence[int] = ()) -> Sample:
        return await ended(self._engine, sample, params=params, resumes=self._resumes, said=said, fed=fed)


async def ended(
    engine: RolloutEngine,
    sample: Sample,
    *,
    params: SamplingParams,
    resumes: int,
    said: int = 0,
    fed: Sequence[int] = (),
) -> Sample:
    """`sample` when the turn that `params` are of has ended by itself.

    said: tokens under loss of the turns before. fed: the environment's tokens before this turn; a turn that was aborted
    before anything was sampled has none of them yet. Raises RuntimeError when it went on `resumes` times in a row and
    came back aborted with nothing new: its tokens are cut off by us, not chosen by the policy, so a reward would teach
    nonsense.
    """
    in_vain = 0
    while (sample := _as_it_ended(sample, params, said)).finish is Finish.ABORT:
        if in_vain == resumes:
            raise RuntimeError(
                f"sample {sample.name} went on {resumes} times and came back aborted with nothing new each time: "
                "something stops it on the server; see its log for who sends it /abort_request"
            )
        new = sample.response_len - said
        left = dataclasses.replace(params, max_new_tokens=params.max_new_tokens - new)
        sample = await engine.continue_sample(sample, () if new else fed, params=left)
        in_vain = in_vain + 1 if sample.response_len - said == new else 0
    return sample


def _as_it_ended(sample: Sample, params: SamplingParams, said: int) -> Sample:
    """A stock server that is told to abort says so also of a request whose last token came in the same step."""
    new = sample.response_len - said
    if sample.finish is not Finish.ABORT or not new:
        return sample
    if int(sample.token_ids[-1]) in params.stop_token_ids:
        return dataclasses.replace(sample, finish=Finish.STOP)
    return dataclasses.replace(sample, finish=Finish.LENGTH) if new >= params.max_new_tokens else sample
