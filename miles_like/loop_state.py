"""Where every part of the loop stands at the boundary of a step, and how all of them go on from there.

What the ranks hold is in their own checkpoint. This is the rest: prompts dealt, groups that wait or are under way with
the samples that were made of them, the ledger, the driver's random numbers, and where its files ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from miles_like.buffer import DataBuffer
from miles_like.driver_random import RANDOM, random_state
from miles_like.ledger import Ledger
from miles_like.producer import Producer
from miles_like.run_state import RunState
from miles_like.types import Json, SampleGroup
from rollout.kept import Kept
from rollout.prompts import PromptSource

_READY, _PARTIAL = "ready/", "partial/"  # what a saved group's key begins with


class Snapshot(NamedTuple):
    """What a checkpoint holds beside the ranks' files."""

    parts: Mapping[str, Json]  # by the part's name
    groups: Mapping[str, SampleGroup]  # not trained yet


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    source: PromptSource
    buffer: DataBuffer
    producer: Producer
    ledger: Ledger
    kept: Kept

    async def snapshot(self, step: int, whole: bool) -> Snapshot:
        """As of now, when `step` is done; the ledger is written up to here.

        whole: with what the servers have sampled of groups in flight, which are aborted for it and go on from there;
        otherwise such a group may be saved with less, or from its beginning.
        """
        if whole and self.buffer.in_flight:
            async with self.kept.suspended():
                return self._now(step)
        return self._now(step)

    def _now(self, step: int) -> Snapshot:
        self.ledger.check(self.buffer.tickets)
        self.ledger.flush(step)
        buffer, ready = self.buffer.state()
        parts = {
            "prompts": self.source.state(),
            "buffer": buffer,
            "producer": self.producer.state(),
            "ledger": self.ledger.state(),
            RANDOM: random_state(),
        }
        groups = {_READY + key: group for key, group in ready.items()}
        return Snapshot(parts, groups | {_PARTIAL + key: group for key, group in self.kept.state().items()})

    def restore(self, state: RunState) -> None:
        """Into parts that have done nothing yet. Raises ValueError naming what does not fit."""
        parts = state.parts
        if missing := {"prompts", "buffer", "producer", "ledger"} - set(parts):
            raise ValueError(f"the checkpoint of step {state.step} has no {', '.join(sorted(missing))} of the loop")
        self.source.restore(parts["prompts"])
        self.ledger.restore(parts["ledger"])
        self.buffer.restore(parts["buffer"], _under(_READY, state.groups), self.source.find)
        self.producer.restore(parts["producer"], version=state.weight_version, find=self.source.find)
        self.kept.restore(_under(_PARTIAL, state.groups))


def _under(prefix: str, groups: Mapping[str, SampleGroup]) -> dict[str, SampleGroup]:
    return {key.removeprefix(prefix): g for key, g in groups.items() if key.startswith(prefix)}
