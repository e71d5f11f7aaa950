"""Many engines as one RolloutEngine."""

from __future__ import annotations

from collections.abc import Sequence

from miles_like.protocols import RolloutEngine
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams
from rollout.concurrency import all_or_first_error


class EnginePool:
    """Distributes prompts over engines by load. All engines serve the same weights.

    Sampling seeds depend on the prompt, not on the engine: the distribution changes no token if the engines' results do
    not depend on the batch.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise ValueError("a pool of 0 engines: rollout.servers must be at least 1")
        self._engines = tuple(engines)
        self._load = [0] * len(engines)  # upper bound on the tokens of each engine's prompts in flight

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """Groups in the order of `prompts`. The first error of an engine cancels the requests to the others."""
        costs = [len(p.token_ids) + n * params.max_new_tokens for p in prompts]
        shares: list[list[int]] = [[] for _ in self._engines]
        for i, cost in enumerate(costs):
            shares[self._assign(cost)].append(i)

        async def sample_on(e: int) -> Sequence[SampleGroup]:
            return await self._engines[e].generate([prompts[i] for i in shares[e]], n=n, params=params)

        busy = [e for e, share in enumerate(shares) if share]
        try:
            done = await all_or_first_error([sample_on(e) for e in busy])
        finally:
            for e, share in enumerate(shares):
                self._load[e] -= sum(costs[i] for i in share)
        groups: list[SampleGroup | None] = [None] * len(prompts)
        for e, part in zip(busy, done, strict=True):
            for i, group in zip(shares[e], part, strict=True):
                groups[i] = group
        return [g for g in groups if g is not None]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """On the engine with the least load. Any engine can continue any sample, because all its tokens are sent."""
        cost = len(sample.token_ids) + len(environment) + params.max_new_tokens
        e = self._assign(cost)
        try:
            return await self._engines[e].continue_sample(sample, environment, params=params)
        finally:
            self._load[e] -= cost

    def _assign(self, cost: int) -> int:
        """Add `cost` tokens to the engine with the least load and return its index."""
        e = min(range(len(self._engines)), key=self._load.__getitem__)
        self._load[e] += cost
        return e

    async def abort_all(self) -> None:
        await all_or_first_error([e.abort_all() for e in self._engines])

    async def pause(self) -> None:
        await all_or_first_error([e.pause() for e in self._engines])

    async def resume(self) -> None:
        await all_or_first_error([e.resume() for e in self._engines])

    async def weight_version(self) -> int:
        """The version that all engines serve. Raises ValueError listing the versions if they differ."""
        versions = await all_or_first_error([e.weight_version() for e in self._engines])
        if len(set(versions)) != 1:
            names = [getattr(e, "url", f"engine {i}") for i, e in enumerate(self._engines)]
            each = ", ".join(f"{n}: {v}" for n, v in zip(names, versions, strict=True))
            raise ValueError(f"engines serve different weight versions ({each}): publish again before generating")
        return int(versions[0])

    async def close(self) -> None:
        await all_or_first_error([e.close() for e in self._engines])
