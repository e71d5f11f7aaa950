"""A greedy answer beside the sampled ones, as the baseline of ReMax.

Letters: G samples a prompt.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error
from rollout.episodes.resuming import EngineWrapper
from rollout.seeds import seed_of


class GreedyFirst(EngineWrapper):
    """A RolloutEngine whose sample 0 of each prompt is greedy; samples 1 .. n - 1 are samples 0 .. n - 2 of `engine`.
    The greedy requests have a different sampling seed (`greedy_seed`), which distinguishes them."""

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """Raises ValueError for `n` below 2, and as the engine."""
        if n < 2:
            raise ValueError(f"{n} samples per prompt, one of which is greedy: request 2 or more")
        greedy, sampled = await all_or_first_error(
            [
                self._engine.generate(prompts, n=1, params=_greedy(params)),
                self._engine.generate(prompts, n=n - 1, params=params),
            ]
        )
        return [
            dataclasses.replace(
                s,
                samples=(*g.samples, *(dataclasses.replace(x, index=x.index + 1) for x in s.samples)),
                discarded=dict(Counter(g.discarded) + Counter(s.discarded)),
            )
            for g, s in zip(greedy, sampled, strict=True)
        ]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        if sample.index == 0:
            return await self._engine.continue_sample(sample, environment, params=_greedy(params))
        inner = dataclasses.replace(sample, index=sample.index - 1)
        turn = await self._engine.continue_sample(inner, environment, params=params)
        return dataclasses.replace(turn, index=sample.index)


def greedy_seed(sampling_seed: int) -> int:
    """The sampling seed of the greedy requests beside those of `sampling_seed`."""
    return seed_of(sampling_seed, "greedy")


def _greedy(params: SamplingParams) -> SamplingParams:
    seed = None if params.sampling_seed is None else greedy_seed(params.sampling_seed)
    return dataclasses.replace(params, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, sampling_seed=seed)
