"""Many engines as one RolloutEngine."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Protocol

from miles_like.protocols import RolloutEngine
from miles_like.types import Prompt, Sample, SampleGroup, SamplingParams, ServerLost
from rollout.concurrency import all_or_first_error

_HOMES = 65536


class Lost(Protocol):
    """A function that is called when an engine does not answer."""

    def __call__(self, why: str, /) -> None: ...


class EnginePool:
    """Distributes prompts over engines by load. All engines serve the same weights.

    Sampling seeds depend on the prompt, not on the engine: the distribution changes no token if the engines' results do
    not depend on the batch.

    lost: called with the reason when an engine does not answer. It then gets no request until `restore`, and its
    requests are sent to other engines. If no engine is left, requests wait during a publication (`expect`), which
    replaces engines that do not answer; otherwise the error is raised. None: the error is always raised.
    """

    def __init__(self, engines: Sequence[RolloutEngine], lost: Lost | None = None) -> None:
        if not engines:
            raise ValueError("a pool of 0 engines is not possible: set rollout.servers to at least 1")
        self._engines = tuple(engines)
        self._load = [0] * len(engines)  # upper bound on the tokens of each engine's prompts in flight
        # (sampling seed, prompt id, index of a sample that has moved) -> the engine that has cached its tokens, of the
        # _HOMES that were used last
        self._homes: OrderedDict[tuple[int | None, str, int | None], int] = OrderedDict()
        self._lost = lost
        self._out: dict[int, ServerLost | None] = {}  # engines that get no request, with their errors
        self._expected = False
        self._restored = asyncio.Event()

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
                self._leave_out(e, error)
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
                self._leave_out(e, error)
            finally:
                self._load[e] -= cost

    def _assign(self, cost: int, home: int | None = None, saved: int = 0) -> int:
        """Add `cost` tokens to the engine with the least load and return its index. home: an engine that computes
        `saved` tokens less."""
        e = min((e for e in range(len(self._engines)) if e not in self._out), key=self._load.__getitem__)
        if home is not None and home not in self._out and self._load[home] - self._load[e] <= saved:
            e = home
        self._load[e] += cost
        return e

    def _settle(self, key: tuple[int | None, str, int | None], e: int) -> None:
        """Note that engine e has the tokens of a prompt, or of a sample."""
        self._homes[key] = e
        self._homes.move_to_end(key)
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)

    # ---- engines that are left out

    def expect(self) -> None:
        """Call when a publication begins; it ends with `restore`, or the run ends."""
        self._expected = True

    def leave_out(self, urls: Collection[str]) -> None:
        """Send no further request to the engines at `urls` until `restore`."""
        self._out |= {e: None for e, engine in enumerate(self._engines) if getattr(engine, "url", None) in urls}

    def restore(self) -> None:
        """Call when all engines serve the same weights again."""
        self._out, self._expected = {}, False
        self._restored.set()

    async def _some_engine(self) -> None:
        """Return once there is an engine that is not left out. Raises ServerLost where none is expected to return."""
        while len(self._out) == len(self._engines):
            if not self._expected:
                raise next(
                    (e for e in self._out.values() if e is not None),
                    ServerLost("no server is left: all of them failed"),
                )
            self._restored.clear()
            await self._restored.wait()

    def _leave_out(self, e: int, error: ServerLost) -> None:
        if self._lost is None:
            raise error
        if e not in self._out:
            self._lost(str(error))
            self._out[e] = error

    # ---- all engines

    async def abort_all(self) -> None:
        async def abort(e: int) -> None:
            try:
                await self._engines[e].abort_all()
            except ServerLost as error:
                self._leave_out(e, error)

        await all_or_first_error([abort(e) for e in range(len(self._engines)) if e not in self._out])

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
