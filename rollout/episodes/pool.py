"""Many engines as one RolloutEngine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from miles_like.protocols import RolloutEngine
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, ServerLost
from rollout.concurrency import all_or_first_error
from rollout.episodes.serving import Serving, url_of

_HOMES = 65536


class EnginePool:
    """Distributes prompts over engines by load. All engines serve the same weights.

    Sampling seeds depend on the prompt, not on the engine: the distribution changes no token if the engines' results do
    not depend on the batch.

    serving: which engines get requests; those of an engine that does not answer are sent to others with the same
    seeds. None: all get requests, and the error of one that does not answer is raised. near: URLs of engines, besides
    which others get requests only while none of these serves; empty: all are equal.
    """

    def __init__(
        self, engines: Sequence[RolloutEngine], serving: Serving | None = None, near: Collection[str] = ()
    ) -> None:
        if not engines:
            raise ValueError("a pool of 0 engines is not possible: set rollout.servers to at least 1")
        self._engines, self._near = list(engines), set(near)
        self._load = [0] * len(engines)  # upper bound on the tokens of each engine's prompts in flight
        # (sampling seed, prompt id, index of a sample that has moved) -> the engine that has cached its tokens, of the
        # _HOMES that were used last
        self._homes: OrderedDict[tuple[int | None, str, int | None], int] = OrderedDict()
        self._serving = serving

    def add(self, engine: RolloutEngine) -> None:
        """Another engine, near to all."""
        self._engines.append(engine)
        self._load.append(0)
        if self._near:
            self._near.add(url_of(engine))

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """Groups in the order of `prompts`. The first error of an engine cancels the requests to the others."""
        costs = [len(p.token_ids) + n * params.max_new_tokens for p in prompts]
        await self._some_engine()
        shares: list[list[int]] = [[] for _ in self._engines]
        for i, cost in enumerate(costs):
            shares[e := self._assign(cost)].append(i)
            self._settle((params.sampling_seed, prompts[i].id, None), e)

        async def sample_on(e: int) -> Sequence[SampleGroup]:
            share = [prompts[i] for i in shares[e]]
            try:
                return await self._engines[e].generate(share, n=n, params=params)
            except ServerLost as error:
                self._lose(e, error, requests=len(share))
            return await self.generate(share, n=n, params=params)

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
        """On the engine that has its tokens in its cache, unless its load exceeds the least one by more than these
        tokens, which another engine computes again. Any engine can continue any sample, because all its
        tokens are sent."""
        cost = len(sample.token_ids) + len(environment) + params.max_new_tokens
        while True:
            await self._some_engine()
            of = (params.sampling_seed, sample.prompt_id)
            home = self._homes.get((*of, sample.index), self._homes.get((*of, None)))
            if (e := self._assign(cost, home, len(sample.token_ids))) != home:
                self._settle((*of, sample.index), e)
            try:
                return await self._engines[e].continue_sample(sample, environment, params=params)
            except ServerLost as error:
                self._lose(e, error)
            finally:
                self._load[e] -= cost

    def _assign(self, cost: int, home: int | None = None, saved: int = 0) -> int:
        """Add `cost` tokens to the engine with the least load and return its index. home: an engine that computes
        `saved` tokens less."""
        there = self._there()
        e = min(there, key=self._load.__getitem__)
        if home is not None and home in there and self._load[home] - self._load[e] <= saved:
            e = home
        self._load[e] += cost
        return e

    def _settle(self, key: tuple[int | None, str, int | None], e: int) -> None:
        """Note that engine e has the tokens of a prompt, or of a sample."""
        self._homes[key] = e
        self._homes.move_to_end(key)
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)

    # ---- engines that serve

    def _there(self) -> Sequence[int]:
        """The engines of which one gets the next request."""
        if self._serving is None:
            return range(len(self._engines))
        serve = [e for e, engine in enumerate(self._engines) if engine in self._serving]
        near = [e for e in serve if url_of(self._engines[e]) in self._near] if self._near else ()
        return near or serve

    async def _some_engine(self) -> None:
        """Raises as `Serving.some`."""
        if self._serving is not None:
            await self._serving.some(self._engines)

    def _lose(self, e: int, error: ServerLost, requests: int = 1) -> None:
        """requests: that are sent again."""
        if self._serving is None:
            raise error
        self._serving.lose(self._engines[e], error)
        self._serving.reissued += requests

    # ---- all engines

    async def abort_all(self) -> None:
        """Also on engines that get no further request, but have some."""

        async def abort(e: int) -> None:
            try:
                await self._engines[e].abort_all()
            except ServerLost as error:
                self._lose(e, error, requests=0)

        busy = (e for e, load in enumerate(self._load) if load)
        await all_or_first_error([abort(e) for e in {*self._there(), *busy}])

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
            raise ValueError(f"the engines serve different weight versions ({each}): publish again before generating")
        return int(versions[0])

    async def close(self) -> None:
        await all_or_first_error([e.close() for e in self._engines])
