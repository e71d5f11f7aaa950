"""Settings of the loop: the buffer between rollout and training, the critic, and checkpoints. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field

from miles_like.config.sections.watched.metric_direction import better
from miles_like.section import Section


class CriticConfig(Section):
    """The value model of algorithm.advantage = "ppo"."""

    lr: float | None = Field(None, gt=0)  # peak learning rate of the critic; None: optimizer.lr


class BufferConfig(Section):
    """How far sampling may run ahead of training (docs/asynchrony.md)."""

    # largest number of weight versions between sampling a token and training on it; 0: on-policy
    max_staleness: int = Field(0, ge=0)
    # groups in flight beyond those of one step, as a share of a step's groups. None: max_staleness, the most that can
    # be trained. With max_staleness = 0, the remaining groups are aborted and discarded when a step is full
    over_sampling: float | None = Field(None, ge=0)
    # publish new weights only after all groups admitted under the old ones have ended, so that the weights of a group
    # do not depend on timing. None: the value of alignment.deterministic
    lockstep: bool | None = None
    # what to do with a group that has tokens older than max_staleness: discard it, or mask these tokens
    old_tokens: Literal["drop", "mask"] = "drop"

    @property
    def slack(self) -> int:
        """Publications allowed between a group's admission and its training, some of its tokens possibly masked."""
        return self.max_staleness + (self.old_tokens == "mask")

    def overlaps(self, *, deterministic: bool) -> bool:
        """Whether samples are in flight while weights are published."""
        return self.slack > 0 and not self.in_lockstep(deterministic=deterministic)

    def in_lockstep(self, *, deterministic: bool) -> bool:
        return deterministic if self.lockstep is None else self.lockstep

    def check(self, *, deterministic: bool) -> None:
        """Raises ValueError for keys that do not fit each other."""
        k, share, lockstep = self.max_staleness, self.over_sampling, self.in_lockstep(deterministic=deterministic)
        if lockstep and k and share is not None:
            raise ValueError(
                f"buffer.over_sampling = {share} has no effect in lockstep with buffer.max_staleness = {k}, which "
                "samples whole steps ahead: remove it, or set buffer.lockstep = false"
            )
        if self.old_tokens == "mask" and (lockstep or share is None or share <= k):
            raise ValueError(
                f"buffer.old_tokens = 'mask' with buffer.over_sampling = {share}, buffer.max_staleness = {k} and "
                f"buffer.lockstep = {str(lockstep).lower()}: no group becomes older than the bound, so nothing would "
                f"be masked: set buffer.over_sampling above {k} and buffer.lockstep = false, or remove it"
            )
        if self.slack and share is not None and share > self.slack:
            raise ValueError(
                f"buffer.over_sampling = {share}: some of these groups would become too old before they are "
                f"trained; with buffer.max_staleness = {k} and buffer.old_tokens = {self.old_tokens!r} at most "
                f"{self.slack} times a step's groups can be in flight beyond it: lower buffer.over_sampling, or "
                "raise buffer.max_staleness"
            )


class CheckpointConfig(Section):
    every: int = Field(0, ge=0)  # steps between checkpoints; 0: only after the last step
    keep: int = Field(2, ge=1)  # number of latest checkpoints to keep
    keep_every: int | None = Field(None, ge=1)  # also keep checkpoints whose step is a multiple of this
    keep_best: str | None = None  # also keep the best checkpoint by this metric, such as "eval/heldout/avg@1"
    asynchronous: bool = False  # write a copy of the state while training continues; requires host memory for the copy
    # seconds after SIGTERM in which the run reaches a step boundary, saves and ends; 0: end without saving
    grace_s: float = Field(20.0, ge=0)
    # time limit from the start of the command; the run saves and ends before it
    deadline_s: float | None = Field(None, gt=0)
    # with --supervise: how often a driver that has died is started again within restart_window_s; 0: never
    restarts: int = Field(5, ge=0)
    restart_window_s: float = Field(3600.0, gt=0)  # seconds in which the restarts are counted
    restart_wait_s: float = Field(5.0, ge=0)  # seconds before the first restart, doubled before each further one

    def check(self, *, sets: Collection[str], eval_every: int) -> None:
        """Raises ValueError for a `keep_best` that would keep nothing. sets: names of the run's eval sets."""
        best, name = self.keep_best, (self.keep_best or "").removeprefix("eval/").partition("/")[0]
        if best is None:
            return
        evaluated = best.startswith("eval/")
        if evaluated and name not in sets:
            there = f"the eval sets are {', '.join(sets)}" if sets else "the run has none: set data.eval"
            raise ValueError(f"checkpoint.keep_best = {best!r}: there is no eval set {name!r}, {there}")
        if not better(best):
            raise ValueError(
                f"checkpoint.keep_best = {best!r}: whether higher or lower is better is undefined for this "
                "metric; choose another one of docs/metrics.md, such as eval/heldout/avg@1, or remove it"
            )
        for key, value in (("checkpoint.every", self.every), ("eval.every", eval_every if evaluated else None)):
            if value == 0:
                raise ValueError(
                    f"checkpoint.keep_best = {best!r} has no effect with {key} = 0, which leaves only the last "
                    f"step to choose from: set {key}, or remove it"
                )
