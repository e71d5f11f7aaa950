"""What a run computes from the values of tokens, in the process that has them.

Letters: G samples a prompt, S tokens a sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from miles_like.algorithms.advantages.parts import with_streams
from miles_like.algorithms.distillation import taught_numbers
from miles_like.batch.packing import check_advantages
from miles_like.experience.teachers import Teachers
from miles_like.protocols import Algorithm, Numbers
from miles_like.types import ADVANTAGES, RETURNS, SampleGroup

Done = tuple[Sequence[SampleGroup], Sequence[Any]]  # the groups with further streams, and numbers of each group


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """Called with the name of a work and groups with the values of their tokens, which the works of one algorithm get
    in their order. Raises what `algorithm` raises."""

    algorithm: Algorithm
    teachers: Teachers | None = None

    async def __call__(self, what: str, groups: Sequence[SampleGroup], *arguments: Any) -> Done:
        if what == "teach":
            assert self.teachers is not None, "taught"
            scored = await self.teachers.score(groups)
            return scored, taught_numbers(scored)
        works: Mapping[str, Callable[..., Done]] = {
            "asked": self._asked,
            "measure": self._measured,
            "place": self._placed,
            "advantages": self._advantages,
            "returns": self._returns,
        }
        return await asyncio.to_thread(works[what], groups, *arguments)

    def _asked(self, groups: Sequence[SampleGroup], names: Sequence[str]) -> Done:
        assert self.teachers is not None, "taught"
        return self.teachers.asked(groups, names), [None] * len(groups)

    def _measured(self, groups: Sequence[SampleGroup]) -> Done:
        assert self.algorithm.parts is not None, "measured in parts"
        return self.algorithm.parts.measure(groups)

    def _placed(self, groups: Sequence[SampleGroup], decided: Sequence[Sequence[Numbers]]) -> Done:
        assert self.algorithm.parts is not None, "placed in parts"
        return _held(groups, self.algorithm.parts.place(groups, decided))

    def _advantages(self, groups: Sequence[SampleGroup]) -> Done:
        """Of all groups of a rollout, for an algorithm without parts."""
        return _held(groups, self.algorithm.advantages(groups))

    def _returns(self, groups: Sequence[SampleGroup]) -> Done:
        found = self.algorithm.returns(groups)
        assert found is not None, "of an algorithm with a critic"
        return with_streams(groups, RETURNS, found), [None] * len(groups)


def _held(groups: Sequence[SampleGroup], advantages: Sequence[Sequence[float | Tensor]]) -> Done:
    """The advantages as numbers, where each sample has one; else as the stream ADVANTAGES of all, and None for samples
    whose tokens differ. Raises ValueError as `check_advantages`."""
    check_advantages(groups, advantages)
    if not any(isinstance(a, Tensor) for values in advantages for a in values):
        return groups, [[float(a) for a in values] for values in advantages]
    of_tokens = [
        [
            a.float() if isinstance(a, Tensor) else torch.full((s.length,), a)
            for a, s in zip(values, group.samples, strict=True)
        ]
        for values, group in zip(advantages, groups, strict=True)
    ]
    numbers = [[None if isinstance(a, Tensor) else float(a) for a in values] for values in advantages]
    return with_streams(groups, ADVANTAGES, of_tokens), numbers
