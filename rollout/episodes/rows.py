"""Rows of an episode: several samples of one index, which a generate function made of what the engine sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from miles_like.protocols import RolloutEngine
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from rollout.episodes.resuming import EngineWrapper


class SampledTokens(EngineWrapper):
    """A RolloutEngine that counts each token that it sampled, with the bits of its log-prob."""

    def __init__(self, engine: RolloutEngine) -> None:
        super().__init__(engine)
        self._sampled = Counter[tuple[int, int]]()

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        groups = await self._engine.generate(prompts, n=n, params=params)
        for g in groups:
            for s in g.samples:
                self._sampled.update(_tokens(s, 0))  # += looks at every token so far
        return groups

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        turn = await self._engine.continue_sample(sample, environment, params=params)
        self._sampled.update(_tokens(turn, sample.length))
        return turn

    def more_often(self, samples: Sequence[Sample]) -> int:
        """The number of tokens under loss in `samples` more often than this engine sampled them with that log-prob."""
        under_loss = Counter[tuple[int, int]]()
        for s in samples:
            under_loss.update(_tokens(s, 0))
        return (under_loss - self._sampled).total()


def _tokens(sample: Sample, start: int) -> Counter[tuple[int, int]]:
    """Those under loss from `start` on."""
    mask = sample.loss_mask[start:]
    ids, logprobs = sample.token_ids[start:][mask], sample.logprobs[start:][mask]
    bits = logprobs.float().contiguous().view(torch.int32)
    return Counter(zip(ids.tolist(), bits.tolist(), strict=True))


def numbered(found: Sequence[Sample | Sequence[Sample]]) -> list[list[Sample]]:
    """The rows of each episode, numbered in their order."""
    rows = [[one] if isinstance(one, Sample) else list(one) for one in found]
    return [[replace(s, row=r) if s.row != r else s for r, s in enumerate(of)] for of in rows]
