"""What it took to fill a step: counts that travel with the groups that were kept, so that they are of the step that
trains them, whatever else was sampled meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from miles_like.types import Json, SampleGroup

Rewards = tuple[str, tuple[float, ...]]  # a prompt's id, what its samples were worth


@dataclass(slots=True, kw_only=True)
class Tally:
    waves: int = 0  # of prompts that were sampled together
    sampled: int = 0  # groups
    samples: int = 0  # scored
    given_up: int = 0  # samples, those of the groups that were sampled
    tokens: int = 0  # sampled
    seconds: float = 0.0  # of sampling and scoring, of waves that were sampled one after the other
    left_out: Counter[str] = field(default_factory=Counter)  # reason -> groups
    rewards: list[Rewards] = field(default_factory=list)  # of every group, as scored: what a curriculum learns from

    def count(self, group: SampleGroup, reason: str | None) -> None:
        """A group that was sampled, and why it was left out."""
        self.sampled += 1
        self.samples += len(group.samples)
        self.given_up += sum(group.discarded.values())
        self.tokens += sum(s.response_len for s in group.samples)
        self.rewards += [(group.prompt.id, tuple(group.rewards))] if group.samples else []
        if reason is not None:
            self.left_out[reason] += 1

    def add(self, other: Tally) -> None:
        self.waves += other.waves
        self.sampled += other.sampled
        self.samples += other.samples
        self.given_up += other.given_up
        self.tokens += other.tokens
        self.seconds += other.seconds
        self.left_out += other.left_out
        self.rewards += other.rewards

    def metrics(self) -> dict[str, float]:
        return {
            "rollout/rounds": float(self.waves),
            "rollout/filtered_frac": self.left_out.total() / max(self.sampled, 1),
            "rollout/discarded_frac": self.given_up / max(self.samples + self.given_up, 1),
            "rollout/tokens": float(self.tokens),
        }

    def state(self) -> Json:
        """Without the seconds, which no resumed run would have again."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {**counts, "left_out": dict(self.left_out), "rewards": [[p, list(r)] for p, r in self.rewards]}

    @classmethod
    def restored(cls, state: Any) -> Tally:
        rewards = [(prompt, tuple(r)) for prompt, r in state["rewards"]]
        return cls(**{n: state[n] for n in _COUNTS}, left_out=Counter(state["left_out"]), rewards=rewards)


_COUNTS = ("waves", "sampled", "samples", "given_up", "tokens")


def total(tallies: Iterable[Tally]) -> Tally:
    out = Tally()
    for t in tallies:
        out.add(t)
    return out
