"""Partial rollouts that outlive their process.

Around the engines of a run, below whoever lets aborted samples go on. It knows the last state of every sample whose
group is not over, so that a checkpoint can hold it, and in the process that resumes it answers with these in place of a
server: they then go on from their tokens, as after any abort.

    running --suspended()--> no call is let in, all under way is aborted, until no call is open: state() is whole
            <--------------- the calls that waited are let in, and what was aborted goes on by them

Not kept: what an environment or a user's own generate function has under way. Their state is theirs, and the first turn
is not the sample: after a resume such prompts are issued again from the start (`remembers` False).

Letters: G samples a prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

from miles_like.protocols import RolloutEngine
from miles_like.types import Finish, Prompt, Sample, SampleGroup, SamplingParams
from rollout.unaborted import Around

Key: TypeAlias = "tuple[int, str]"  # sampling seed, prompt id: what the tokens of a group follow from

# A request that is still on its way to the server when it is told to abort all is not aborted: it is told again.
_ABORT_AGAIN_S = 0.1


class Kept(Around):
    """remembers: False where samples are made by several calls (rollout/plays); it can be suspended all the same."""

    def __init__(self, engine: RolloutEngine, *, remembers: bool = True) -> None:
        super().__init__(engine)
        self._remembers = remembers
        self._groups: dict[Key, SampleGroup] = {}  # [G] samples as they came back last
        self._restored: dict[Key, SampleGroup] = {}  # not asked for yet
        self._let_in = asyncio.Event()
        self._let_in.set()
        self._open = 0  # calls
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._suspensions = 0  # ever

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """As the engine's; a group that was restored comes back as it was, once.

        Raises ValueError where the restored one is of another number of samples or another prompt.
        """
        keys = [self._key(params, p.id) for p in prompts]
        found = {i: self._restored.pop(k) for i, k in enumerate(keys) if k is not None and k in self._restored}
        for i, group in found.items():
            _check(group, prompts[i], n)
        self._groups |= {k: found[i] for i, k in enumerate(keys) if k is not None and i in found}
        rest = [i for i in range(len(prompts)) if i not in found]
        if rest:
            async with self._call():
                new = await self._engine.generate([prompts[i] for i in rest], n=n, params=params)
            found |= dict(zip(rest, new, strict=True))
        self._groups |= {k: found[i] for i, k in enumerate(keys) if k is not None}
        return [found[i] for i in range(len(prompts))]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """As the engine's. What came back with nothing new because it was suspended is asked for again, so that nobody
        takes it for a server that aborts all it is given."""
        while True:
            async with self._call():
                suspensions = self._suspensions
                turn = await self._engine.continue_sample(sample, environment, params=params)
            in_vain = turn.finish is Finish.ABORT and len(turn.token_ids) == len(sample.token_ids)
            if not in_vain or suspensions == self._suspensions:
                break
        key = self._key(params, sample.prompt_id)
        if key is not None and (group := self._groups.get(key)) is not None:
            samples = tuple(turn if s.index == turn.index else s for s in group.samples)
            self._groups[key] = dataclasses.replace(group, samples=samples)
        return turn

    def forget(self, sampling_seed: int, prompt_id: str) -> None:
        """The group is over: somebody else holds it, or nobody wants it. No error when it is unknown."""
        self._groups.pop((sampling_seed, prompt_id), None)
        self._restored.pop((sampling_seed, prompt_id), None)

    @asynccontextmanager
    async def suspended(self) -> AsyncGenerator[None, None]:
        """Inside, no server does anything for this run and `state` is all there is. The aborts are not counted against
        anybody's limit. Raises what the engine raises that cannot be told to abort; then everything goes on."""
        assert self._let_in.is_set(), "suspended twice"
        self._suspensions += 1
        self._let_in.clear()
        try:
            while self._open:
                await self._engine.abort_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_AGAIN_S):
                        await self._none_open.wait()
            yield
        finally:
            self._let_in.set()

    def state(self) -> dict[str, SampleGroup]:
        """By "seed/prompt id": the groups of which something was sampled, their samples aborted or ended, unscored.
        Whole only while suspended."""
        groups = {**self._restored, **self._groups}
        begun = {k: g for k, g in groups.items() if any(s.versions for s in g.samples)}
        return {f"{seed}/{prompt}": group for (seed, prompt), group in begun.items()}

    def restore(self, state: Mapping[str, SampleGroup]) -> None:
        """What `state` gave. Raises ValueError for a key that it cannot have given."""
        for name, group in state.items():
            seed, _, prompt = name.partition("/")
            if not seed.isdecimal() or prompt != group.prompt.id:
                raise ValueError(f"a partial rollout of prompt {group.prompt.id!r} is called {name!r}: it is damaged")
            self._restored[int(seed), prompt] = group

    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[None, None]:
        """Let in as long as nothing is suspended."""
        while not self._let_in.is_set():  # it may be suspended again before this task is woken
            await self._let_in.wait()
        self._open += 1
        self._none_open.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._none_open.set()

    def _key(self, params: SamplingParams, prompt_id: str) -> Key | None:
        """None: nobody is to remember it."""
        return (params.sampling_seed, prompt_id) if self._remembers and params.sampling_seed is not None else None


def _check(group: SampleGroup, prompt: Prompt, n: int) -> None:
    if len(group.samples) != n:
        raise ValueError(
            f"prompt {prompt.id!r} was under way with {len(group.samples)} samples, now {n} are asked for: resume with "
            "the train.samples_per_group that it was begun with, or use --fresh"
        )
    if group.prompt.token_ids != prompt.token_ids:
        raise ValueError(
            f"prompt {prompt.id!r} was under way with {len(group.prompt.token_ids)} other tokens than its "
            f"{len(prompt.token_ids)} of now: resume with the prompts that it was begun with, or use --fresh"
        )
