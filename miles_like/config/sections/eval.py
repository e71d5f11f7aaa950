"""Evaluation settings: held-out prompt sets, sampling and frequency (docs/evaluation.md). Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, model_validator

from miles_like.config.sections.flat import changed
from miles_like.section import Section

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # it is a component of metric names


class SetConfig(Section):
    """One further set. Keys that are not given are as for `data.eval`."""

    path: str  # a file or a hub name, with the columns that [data] specifies
    samples: int | None = Field(None, ge=1)  # None: eval.samples
    greedy: bool | None = None  # None: eval.greedy
    temperature: float | None = Field(None, gt=0)  # None: eval.temperature
    max_prompts: int | None = Field(None, ge=1)  # None: eval.max_prompts
    max_new_tokens: int | None = Field(None, ge=1)  # None: rollout.max_new_tokens
    reward: str | None = None  # None: reward.name


class EvalSet(Section):
    """One set with all settings resolved."""

    name: str
    path: str
    samples: int
    greedy: bool
    temperature: float | None  # None: rollout.temperature
    max_prompts: int | None  # None: all
    max_new_tokens: int | None  # None: rollout.max_new_tokens
    reward: str | None  # None: reward.name

    @property
    def sampled(self) -> int:
        """Sampled answers per prompt; with `greedy` a single answer is the greedy one."""
        return 0 if self.greedy and self.samples == 1 else self.samples

    @model_validator(mode="after")
    def name_stands_in_metrics(self) -> EvalSet:
        if not NAME.fullmatch(self.name):
            raise ValueError(
                f"eval set {self.name!r} ({self.path}) cannot be part of a metric's name: use letters, digits, "
                "'.', '_' and '-' (data.eval is named after its file; for [eval.sets.NAME], choose another NAME)"
            )
        return self


class EvalConfig(Section):
    # steps between evaluations, besides those before the first and after the last step; 0: never evaluate
    every: int = Field(25, ge=0)
    samples: int = Field(1, ge=1)  # k of avg@k and pass@k: sampled answers per prompt
    greedy: bool = True  # also one greedy answer per prompt; with samples = 1 it is the only answer
    temperature: float | None = Field(None, gt=0)  # sampling temperature; None: rollout.temperature
    max_prompts: int | None = Field(None, ge=1)  # number of prompts per set, from its beginning; None: all
    sets: dict[str, SetConfig] = Field(default_factory=dict)  # name -> further sets beside data.eval

    def all_sets(self, first: str | None) -> tuple[EvalSet, ...]:
        """`first` (data.eval), named by its file's stem, then `sets`. Raises ValueError for a duplicate name, and for
        keys that would do nothing."""
        given = {} if first is None else {Path(first).stem: SetConfig(path=first)}
        if twice := given.keys() & self.sets.keys():
            name = twice.pop()
            raise ValueError(
                f"data.eval = {first!r} and [eval.sets.{name}] have the same name {name!r} in metrics: rename the "
                "latter"
            )
        given |= self.sets
        for key, value in changed(self):
            if key in _SHARED and not given:
                raise ValueError(f"eval.{key} = {value} has no effect without an eval set: set data.eval")
        shared = self.model_dump(include=set(_SHARED)) | {"max_new_tokens": None, "reward": None}
        out = tuple(EvalSet(name=n, **shared | s.model_dump(exclude_none=True)) for n, s in given.items())
        greedy = {s.name for s in out if not s.sampled}
        cold = [f"eval.sets.{n}" for n, s in self.sets.items() if n in greedy and s.temperature is not None]
        if self.temperature is not None and given.keys() == greedy:
            cold.append("eval")
        if cold:
            raise ValueError(
                f"{cold[0]}.temperature has no effect with samples = 1 and greedy = true, which give one greedy "
                "answer per prompt: raise samples, set greedy = false, or remove it"
            )
        return out


def check_measured(sets: Iterable[EvalSet], reward: str | None, *, played: bool) -> None:
    """Raises ValueError for a set whose metrics could only be 0. reward: reward.name; played: whether an environment or
    a generate function may score."""
    for s in sets:
        if not played and (s.reward or reward) == "none":
            raise ValueError(
                f"reward.name = 'none' is 0 for every answer, so the eval set {s.name!r} would measure nothing: "
                "choose another reward, or replace data.eval by an [eval.sets.NAME] with its own reward"
            )


_SHARED = ("samples", "greedy", "temperature", "max_prompts")
