"""The loop's own sections of a run's configuration: what waits between its halves, and what is saved. Torch-free."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from pydantic import Field

from megatron_bridge.config import Section
from miles_like.metric_direction import better


class BufferConfig(Section):
    """How far sampling may be ahead of training (docs/asynchrony.md)."""

    max_staleness: int = Field(0, ge=0)  # weight versions between a token and the weights that it trains; 0: on-policy
    # groups under way beyond those of one step, as a share of these. None: as many as the bound lets train, which is
    # max_staleness. With max_staleness = 0 what is left over when a step is full is aborted and discarded.
    over_sampling: float | None = Field(None, ge=0)
    # which weights sample a group follows from its admission, not from the clock: weights are published when all that
    # was admitted under the old ones has ended. None: with alignment.deterministic
    lockstep: bool | None = None
    # a group with tokens older than max_staleness: leave it out, or train it without them
    old_tokens: Literal["drop", "mask"] = "drop"

    @property
    def slack(self) -> int:
        """Publications that a group may live through before it is trained, whatever is left of it to train."""
        return self.max_staleness + (self.old_tokens == "mask")

    def freely(self, *, deterministic: bool) -> bool:
        """Whether samples are under way while weights are published."""
        return self.slack > 0 and not self.in_lockstep(deterministic=deterministic)

    def in_lockstep(self, *, deterministic: bool) -> bool:
        return deterministic if self.lockstep is None else self.lockstep

    def check(self, *, deterministic: bool) -> None:
        """Raises ValueError for keys that do not fit each other."""
        k, share, lockstep = self.max_staleness, self.over_sampling, self.in_lockstep(deterministic=deterministic)
        if lockstep and k and share is not None:
            raise ValueError(
                f"buffer.over_sampling = {share} does nothing in lockstep with buffer.max_staleness = {k}, where whole "
                "steps are sampled ahead: remove it, or set buffer.lockstep = false"
            )
        if self.old_tokens == "mask" and (lockstep or share is None or share <= k):
            raise ValueError(
                f"buffer.old_tokens = 'mask' with buffer.over_sampling = {share}, buffer.max_staleness = {k} and "
                f"buffer.lockstep = {str(lockstep).lower()}: no group ever gets older than the bound, so nothing would "
                f"be masked: set buffer.over_sampling above {k} and buffer.lockstep = false, or remove it"
            )
        if self.slack and share is not None and share > self.slack:
            raise ValueError(
                f"buffer.over_sampling = {share}: of so many groups some would be too old before they are trained; "
                f"with buffer.max_staleness = {k} and buffer.old_tokens = {self.old_tokens!r} at most {self.slack} of "
                "a step's groups can be under way beyond it: lower it, or raise buffer.max_staleness"
            )


class CheckpointConfig(Section):
    every: int = Field(0, ge=0)  # 0: only after the last step
    keep: int = Field(2, ge=1)  # the last so many
    keep_every: int | None = Field(None, ge=1)  # and every one whose step it divides
    keep_best: str | None = None  # and the best so far by this metric, such as "eval/heldout/avg@1"
    asynchronous: bool = False  # training goes on while a copy of the state is written; costs that copy's host memory
    # after SIGTERM the run saves where it stands, if it comes to such a place in time, and ends; 0: it ends at once
    grace_s: float = Field(20.0, ge=0)
    deadline_s: float | None = Field(None, gt=0)  # from the start of the command: by then the run has saved and ended

    def check(self, *, sets: Collection[str], eval_every: int) -> None:
        """sets: the run's eval sets by name. Raises ValueError for a `keep_best` that would keep nothing."""
        best, name = self.keep_best, (self.keep_best or "").removeprefix("eval/").partition("/")[0]
        if best is None:
            return
        evaluated = best.startswith("eval/")
        if evaluated and name not in sets:
            there = f"the run's are {', '.join(sets)}" if sets else "the run has none: give data.eval"
            raise ValueError(f"checkpoint.keep_best = {best!r}: there is no eval set {name!r}, {there}")
        if not better(best):
            raise ValueError(
                f"checkpoint.keep_best = {best!r}: of it neither larger nor smaller is better; name another of "
                "docs/metrics.md, such as eval/heldout/avg@1, or remove it"
            )
        for key, value in (("checkpoint.every", self.every), ("eval.every", eval_every if evaluated else None)):
            if value == 0:
                raise ValueError(
                    f"checkpoint.keep_best = {best!r} does nothing with {key} = 0, which leaves the last step to "
                    f"choose from: set {key}, or remove it"
                )
