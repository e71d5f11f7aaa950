"""Counts every group: trained once or discarded once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class SimLedger:
    """Groups by id. Raises RuntimeError for one that ends twice, or that was not admitted."""

    admitted: int = 0
    trained: dict[int, int] = field(default_factory=dict)  # group id -> step, from 0
    discarded: dict[int, str] = field(default_factory=dict)  # group id -> reason

    def __deepcopy__(self, memo: object) -> SimLedger:
        return replace(self, trained=dict(self.trained), discarded=dict(self.discarded))

    def admit(self) -> int:
        """The next group id."""
        self.admitted += 1
        return self.admitted - 1

    def train(self, group_id: int, step: int) -> None:
        self._check(group_id)
        self.trained[group_id] = step

    def discard(self, group_id: int, reason: str) -> None:
        self._check(group_id)
        self.discarded[group_id] = reason

    @property
    def reasons(self) -> Counter[str]:
        return Counter(self.discarded.values())

    @property
    def outstanding(self) -> int:
        return self.admitted - len(self.trained) - len(self.discarded)

    def _check(self, group_id: int) -> None:
        fate = self.trained.get(group_id, self.discarded.get(group_id))
        if fate is not None or not 0 <= group_id < self.admitted:
            raise RuntimeError(f"group {group_id} of {self.admitted} ends twice, or was not admitted: {fate}")
