"""Counts of the sampling that filled a step. They are stored with the groups that were kept, so they are reported in
the step that trains these groups, even if other groups were sampled in the meantime."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from miles_like.types import Json, SampleGroup

Rewards = tuple[str, tuple[float, ...]]  # id of a prompt, rewards of its samples


@dataclass(slots=True, kw_only=True)
class RolloutStats:
    rounds: int = 0  # of prompts that were sampled together
    sampled: int = 0  # groups
    samples: int = 0  # scored
    discarded_samples: int = 0  # unscored, of the groups that were sampled
    tokens: int = 0  # sampled
    seconds: float = 0.0  # of sampling and scoring, of rounds that were sampled one after the other
    discarded: Counter[str] = field(default_factory=Counter)  # reason -> groups
    rewards: list[Rewards] = field(default_factory=list)  # of every group, as scored: a curriculum learns from them

    def count(self, group: SampleGroup, reason: str | None) -> None:
        """Counts a sampled group. reason: why it is discarded; None: it is kept."""
        self.sampled += 1
        self.samples += len(group.episodes)
        self.discarded_samples += sum(group.discarded.values())
        self.tokens += sum(s.response_len for s in group.samples)
        self.rewards += [(group.prompt.id, tuple(group.rewards))] if group.samples else []
        if reason is not None:
            self.discarded[reason] += 1

    def add(self, other: RolloutStats) -> None:
        self.rounds += other.rounds
        self.sampled += other.sampled
        self.samples += other.samples
        self.discarded_samples += other.discarded_samples
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.discarded += other.discarded
        self.rewards += other.rewards

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/rounds": float(self.rounds),
            "rollout/filtered_frac": self.discarded.total() / max(self.sampled, 1),
            "rollout/discarded_frac": self.discarded_samples / max(self.samples + self.discarded_samples, 1),
            "rollout/tokens": float(self.tokens),
        }

    def state(self) -> Json:
        """All counts but the seconds, which differ in a resumed run. The keys are those of run_state.json."""
        return {
            "waves": self.rounds,
            "sampled": self.sampled,
            "samples": self.samples,
            "given_up": self.discarded_samples,
            "tokens": self.tokens,
            "left_out": dict(self.discarded),
            "rewards": [[p, list(r)] for p, r in self.rewards],
        }

    @classmethod
    def restored(cls, state: Any) -> RolloutStats:
        return cls(
            rounds=state["waves"],
            sampled=state["sampled"],
            samples=state["samples"],
            discarded_samples=state["given_up"],
            tokens=state["tokens"],
            discarded=Counter(state["left_out"]),
            rewards=[(prompt, tuple(r)) for prompt, r in state["rewards"]],
        )


def total(stats: Iterable[RolloutStats]) -> RolloutStats:
    out = RolloutStats()
    for s in stats:
        out.add(s)
    return out
