"""The loop's own sections of a run's configuration: what waits between its halves, and what is saved. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from megatron_bridge.config import Section


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


class CheckpointConfig(Section):
    every: int = Field(0, ge=0)  # 0: only after the last step
    keep: int = Field(2, ge=1)  # the last so many
    keep_every: int | None = Field(None, ge=1)  # and every one whose step it divides
    keep_best: str | None = None  # and the best so far by this metric, such as "eval/heldout/avg@1"
    asynchronous: bool = False  # training goes on while a copy of the state is written; costs that copy's host memory
    # after SIGTERM the run saves where it stands, if it comes to such a place in time, and ends; 0: it ends at once
    grace_s: float = Field(20.0, ge=0)
    deadline_s: float | None = Field(None, gt=0)  # from the start of the command: by then the run has saved and ended
