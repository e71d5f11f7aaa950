"""Partial rollouts that are saved in a checkpoint and continued after a resume.

PartialRollouts wraps the engines of a run, below the code that resumes aborted samples. It keeps the last state of
every sample of an unfinished group for the checkpoint. After a resume it returns the restored samples instead of
sending a request; they are then continued from their tokens, as after any abort.

    running --suspended()--> new calls wait, and running ones are aborted until none is left: state() is complete
            <--------------- the waiting calls run and continue the aborted samples

An episode with an environment is kept with the spans of its turns, by which a new environment is brought to where the
old one was (replay.py). Not kept: samples of a user's generate function, which has state in the process: after a resume
such prompts are sampled from the start (`keep_groups` False).

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
from rollout.episodes.resuming import EngineWrapper

Key: TypeAlias = "tuple[int, str]"  # sampling seed, prompt id: they determine the tokens of a group

# A request that reaches the server after abort_all is not aborted, so abort_all is repeated.
_ABORT_AGAIN_S = 0.1


class PartialRollouts(EngineWrapper):
    """keep_groups: False if a user's function makes samples by several calls; calls can still be suspended."""

    def __init__(self, engine: RolloutEngine, *, keep_groups: bool = True) -> None:
        super().__init__(engine)
        self._keep_groups = keep_groups
        self._groups: dict[Key, SampleGroup] = {}  # [G] samples as last returned
        self._restored: dict[Key, SampleGroup] = {}  # not requested yet
        self._running = asyncio.Event()  # cleared while suspended
        self._running.set()
        self._calls = 0  # in flight
        self._idle = asyncio.Event()  # set while no call is in flight
        self._idle.set()
        self._suspensions = 0  # since the start
        self._suspended = 0  # contexts of `suspended` that are entered now

    async def generate(self, prompts: Sequence[Prompt], *, n: int, params: SamplingParams) -> Sequence[SampleGroup]:
        """As the engine's, but a restored group is returned once instead.

        Raises ValueError if the restored group has another number of samples or another prompt.
        """
        keys = [self._key(params, p.id) for p in prompts]
        groups = {i: self._restored.pop(k) for i, k in enumerate(keys) if k is not None and k in self._restored}
        for i, group in groups.items():
            _check(group, prompts[i], n)
        self._groups |= {k: groups[i] for i, k in enumerate(keys) if k is not None and i in groups}
        rest = [i for i in range(len(prompts)) if i not in groups]
        if rest:
            async with self._call():
                new = await self._engine.generate([prompts[i] for i in rest], n=n, params=params)
            groups |= dict(zip(rest, new, strict=True))
        self._groups |= {k: groups[i] for i, k in enumerate(keys) if k is not None}
        return [groups[i] for i in range(len(prompts))]

    async def continue_sample(
        self, sample: Sample, environment: Sequence[int] = (), *, params: SamplingParams
    ) -> Sample:
        """As the engine's. A call that a suspension aborted before the first new token is repeated, so that the caller
        does not count it as an abort."""
        while True:
            async with self._call():
                suspensions = self._suspensions
                turn = await self._engine.continue_sample(sample, environment, params=params)
            nothing_new = turn.finish is Finish.ABORT and len(turn.token_ids) == len(sample.token_ids)
            if not nothing_new or suspensions == self._suspensions:
                break
        key = self._key(params, sample.prompt_id)
        if key is not None and (group := self._groups.get(key)) is not None:
            samples = tuple(turn if s.index == turn.index else s for s in group.samples)
            self._groups[key] = dataclasses.replace(group, samples=samples)
        return turn

    def forget(self, sampling_seed: int, prompt_id: str) -> None:
        """Forget a finished or discarded group. An unknown group is no error."""
        self._groups.pop((sampling_seed, prompt_id), None)
        self._restored.pop((sampling_seed, prompt_id), None)

    @asynccontextmanager
    async def suspended(self) -> AsyncGenerator[None, None]:
        """Inside the context no request of this run is on a server, and `state` is complete. The aborts do not count
        against the limit of resumes. If `abort_all` raises, the error is passed on and calls run again. Contexts may be
        nested: calls run again after the last."""
        self._suspensions += 1
        self._suspended += 1
        self._running.clear()
        try:
            while self._calls:
                await self._engine.abort_all()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_ABORT_AGAIN_S):
                        await self._idle.wait()
            yield
        finally:
            self._suspended -= 1
            if not self._suspended:
                self._running.set()

    def state(self) -> dict[str, SampleGroup]:
        """The groups with at least one sampled token, by "seed/prompt id". Their samples are aborted or complete, and
        unscored. Complete only while suspended."""
        groups = {**self._restored, **self._groups}
        started = {k: g for k, g in groups.items() if any(s.versions for s in g.samples)}
        return {f"{seed}/{prompt}": group for (seed, prompt), group in started.items()}

    def restore(self, state: Mapping[str, SampleGroup]) -> None:
        """Restore the groups that `state` returned. Raises ValueError for a key that `state` does not make."""
        for name, group in state.items():
            seed, _, prompt = name.partition("/")
            if not seed.isdecimal() or prompt != group.prompt.id:
                raise ValueError(
                    f"the partial rollout of prompt {group.prompt.id!r} has the key {name!r}: it is damaged"
                )
            self._restored[int(seed), prompt] = group

    @asynccontextmanager
    async def _call(self) -> AsyncGenerator[None, None]:
        """Wait while suspended, then count a call in flight."""
        while not self._running.is_set():  # it may be suspended again before this task runs
            await self._running.wait()
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _key(self, params: SamplingParams, prompt_id: str) -> Key | None:
        """The key of a group to keep, else None."""
        return (params.sampling_seed, prompt_id) if self._keep_groups and params.sampling_seed is not None else None


def _check(group: SampleGroup, prompt: Prompt, n: int) -> None:
    if len(group.samples) != n:
        raise ValueError(
            f"prompt {prompt.id!r} was in flight with {len(group.samples)} samples, but train.samples_per_group = "
            f"{n} now: resume with the original train.samples_per_group, or use --fresh"
        )
    if group.prompt.token_ids != prompt.token_ids:
        raise ValueError(
            f"prompt {prompt.id!r} was in flight with {len(group.prompt.token_ids)} tokens, but its "
            f"{len(prompt.token_ids)} tokens differ now: resume with the original prompts, or use --fresh"
        )
