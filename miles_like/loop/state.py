"""State of every part of the loop at the boundary of two steps, and how it is restored.

The trainer's state is in the ranks' checkpoint. The state here is: prompts consumed, groups that wait or are
in flight with their samples, the ledger, and the driver's random states.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from miles_like.checkpoint.random_state import RANDOM, random_state
from miles_like.checkpoint.run_state import RunState
from miles_like.checkpoint.writer import Snapshot
from miles_like.loop.feed import Feed
from miles_like.loop.recorder import Recorder
from miles_like.types import Json, SampleGroup
from rollout.prompts.mix import PromptSource

KNOWN_ANSWER = "known_answer"  # the part of the run's state
_READY, _PARTIAL = "ready/", "partial/"  # prefixes of a saved group's key


@runtime_checkable
class HeldGroups(Protocol):
    """The rollout workers, which hold the values of tokens and save them (miles_like.cluster.workers.pool)."""

    def suspended(self) -> AbstractAsyncContextManager[None]: ...

    async def boundary(self, complete: Mapping[str, SampleGroup]) -> None:
        """Remember the state at the boundary of two steps. complete: waiting groups by their keys in a checkpoint."""

    async def write(self, folder: Path) -> Mapping[str, str]:
        """Write that state into the folder of a checkpoint: name of a file there -> SHA-256."""


class Unfinished(Protocol):
    """The samples of groups that are not complete (rollout.episodes.partial.PartialRollouts)."""

    def suspended(self) -> AbstractAsyncContextManager[None]: ...
    def state(self) -> Mapping[str, SampleGroup]: ...
    def restore(self, state: Mapping[str, SampleGroup]) -> None: ...


class PastGaps(Protocol):
    """Gaps between servers and trainer after earlier publications (miles_like.alignment.known_answer)."""

    def state(self) -> Json: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The objects of the loop that have state. known: restored before the loop is made; None: servers score no text.
    partial: of this process, or the workers, whose groups are restored before the loop is made."""

    source: PromptSource
    feed: Feed
    recorder: Recorder
    partial: Unfinished | HeldGroups
    known: PastGaps | None = None

    async def snapshot(self, step: int, whole: bool) -> Snapshot:
        """The state after `step` steps; the ledger file is written up to this step.

        whole: include all tokens of groups in flight: their requests are aborted first and continued afterwards.
        Otherwise such a group may be saved with fewer tokens, or none.
        """
        if whole and self.feed.buffer.in_flight:
            async with self.partial.suspended():
                return await self._now(step)
        return await self._now(step)

    async def _now(self, step: int) -> Snapshot:
        ledger = self.recorder.ledger
        ledger.check(self.feed.buffer.group_ids)
        ledger.flush(step)
        buffer, ready = self.feed.buffer.state()
        parts = {
            "prompts": self.source.state(),
            "buffer": buffer,
            "producer": self.feed.producer.state(),
            "ledger": ledger.state(),
            RANDOM: random_state(),
        }
        if self.known is not None:
            parts[KNOWN_ANSWER] = self.known.state()
        groups = {_READY + key: group for key, group in ready.items()}
        if isinstance(self.partial, HeldGroups):
            await self.partial.boundary(groups)
            return Snapshot(parts=parts, tokens_total=self.recorder.tokens_total, write=self.partial.write)
        groups |= {_PARTIAL + key: group for key, group in self.partial.state().items()}
        return Snapshot(parts=parts, groups=groups, tokens_total=self.recorder.tokens_total)

    def restore(self, state: RunState) -> None:
        """Restores new objects, before their first step. Raises ValueError naming what does not fit."""
        parts = state.parts
        if missing := {"prompts", "buffer", "producer", "ledger"} - set(parts):
            raise ValueError(
                f"the checkpoint of step {state.step} has no state of the loop's {', '.join(sorted(missing))}: "
                "resume from an earlier checkpoint"
            )
        self.recorder.tokens_total = state.tokens_total
        prompts = parts["prompts"]
        if not isinstance(prompts, Mapping):
            raise ValueError(
                f"the checkpoint of step {state.step} has a {type(prompts).__name__} as the prompts' state, "
                "expected an object: resume from an earlier checkpoint"
            )
        self.source.restore(prompts)
        self.recorder.ledger.restore(parts["ledger"])
        self.feed.buffer.restore(parts["buffer"], _under(_READY, state.groups), self.source.find)
        self.feed.producer.restore(parts["producer"], version=state.weight_version, find=self.source.find)
        if not isinstance(self.partial, HeldGroups):
            self.partial.restore(_under(_PARTIAL, state.groups))


def _under(prefix: str, groups: Mapping[str, SampleGroup]) -> dict[str, SampleGroup]:
    return {key.removeprefix(prefix): g for key, g in groups.items() if key.startswith(prefix)}
