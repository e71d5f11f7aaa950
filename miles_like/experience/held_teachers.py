"""The teachers of a run whose rollout workers hold the values of tokens.

A teacher on servers is asked by the workers. For one whose weights the trainer has, the workers make the sequences that
it is fed, the trainer's ranks score these, and the workers move the scores to the student's places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles_like.algorithms.distillation import distill_metrics
from miles_like.experience.experience import TokenValues
from miles_like.experience.teachers import Teachers, TrainerTeacher
from miles_like.protocols import Numbers
from miles_like.types import TEACHER, SampleGroup
from rollout.sglang.http_replies import RolloutError

_TRIES = 3  # of the workers, whose requests to a server are sent again by themselves


class TeachingValues(TokenValues, Protocol):
    """The values that workers hold (cluster.workers.values.HeldValues)."""

    async def each(self, what: str, groups: Sequence[SampleGroup]) -> list[Any]:
        """Lets each worker compute from its groups; numbers of each group."""

    async def gathered(self, what: str, groups: Sequence[SampleGroup]) -> list[Any]:
        """As `each`, by one worker, to which the others lend their groups."""

    async def derived(
        self, what: str, groups: Sequence[SampleGroup], arguments: Sequence[str]
    ) -> Sequence[SampleGroup]:
        """Lets each worker hold further groups, made from its own."""

    async def moved(self, stream: str, groups: Sequence[SampleGroup], derived: Sequence[SampleGroup]) -> None:
        """Gives samples the stream of the derived ones at the tokens after the prompt, 0 at those without loss."""

    def release(self, groups: Sequence[SampleGroup]) -> None:
        """Frees derived groups."""


@dataclass(slots=True, kw_only=True)
class HeldTeachers:
    """A Scorer. own: the teachers of this process, which begin and end their servers and load weights; at_once: one
    worker asks the servers for all groups of a step, so that the requests do not depend on the number of workers;
    serving: the context in which servers of the rollout are asked."""

    own: Teachers
    values: TeachingValues
    at_once: bool
    serving: Callable[[], AbstractAsyncContextManager[None]]
    _numbers: Sequence[Sequence[Numbers]] = field(default_factory=list)  # of the groups scored last

    async def score(self, groups: Sequence[SampleGroup]) -> Sequence[SampleGroup]:
        """Raises the first error; RolloutError for a server that its restarts do not bring back."""
        for name, teacher in self.own.of_trainer.items():
            taught = [g for g in groups if self.own.teacher_of(g.prompt.source) == name]
            if taught:
                await self._by_trainer(name, teacher, taught)
        for left in reversed(range(_TRIES)):
            try:
                async with self.serving():
                    ask = self.values.gathered if self.at_once else self.values.each
                    self._numbers = await ask("teach", groups)
                return groups
            except RolloutError:
                if not left or not await self.own.restarted():
                    raise
        raise AssertionError("the last try returns or raises")

    async def _by_trainer(self, name: str, teacher: TrainerTeacher, groups: Sequence[SampleGroup]) -> None:
        asked = await self.values.derived("asked", groups, [name] * len(groups))
        try:
            if any(s.response_len for g in asked for s in g.samples):
                (batch,) = teacher.packer.steps(asked, only=())
                asked = await self.values.logprobs(
                    asked, batch, teacher.trainer, weights=teacher.weights, stream=TEACHER
                )
            await self.values.moved(TEACHER, groups, asked)
        finally:
            self.values.release(asked)

    def metrics(self, groups: Sequence[SampleGroup]) -> Mapping[str, float]:
        """`distill/*` of a step's groups, which `score` returned last."""
        return distill_metrics(groups, self._numbers, self.own.teacher_of)
