"""How often a run may rebuild its trainer ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from miles_like.types import RanksLostError


class RebuildBudget:
    """cluster.rebuilds within cluster.rebuild_window_s seconds."""

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.window_s, self._clock = limit, window_s, clock
        self._losses: list[tuple[float, str]] = []  # within the window: when, and what was lost

    @property
    def left(self) -> bool:
        """Whether ranks that are lost now would be rebuilt."""
        return len(self._recent()) < self.limit

    def spend(self, lost: RanksLostError) -> str:
        """Counts a loss after which the ranks are rebuilt; returns a clause for the log. Raises `lost` itself where
        nothing is rebuilt, and RuntimeError naming every loss of the window where it has too many."""
        if not self.limit:
            raise lost
        self._losses = [*self._recent(), (self._clock(), lost.what)]
        if len(self._losses) > self.limit:
            each = "; ".join(f"{i}. {what}" for i, (_, what) in enumerate(self._losses, 1))
            raise RuntimeError(
                f"ranks were lost {len(self._losses)} times within {self.window_s:g} s, but cluster.rebuilds = "
                f"{self.limit}: {each}; see logs/ in the run directory; --resume continues from the latest checkpoint"
            ) from lost
        return f"{len(self._losses)} of at most {self.limit} within {self.window_s:g} s"

    def _recent(self) -> list[tuple[float, str]]:
        now = self._clock()
        return [(at, what) for at, what in self._losses if now - at < self.window_s]
