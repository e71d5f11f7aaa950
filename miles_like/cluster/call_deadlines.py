"""Time limits of remote calls, which grow with the durations of earlier calls."""

from __future__ import annotations

from collections import defaultdict

GROWTH = 10.0  # the limit of a call, as a multiple of the longest earlier call of that name


class CallDeadlines:
    """A time limit per call name. least_s: the lower bound of every limit."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._longest: defaultdict[str, float] = defaultdict(float)

    def limit(self, call: str) -> float:
        """Seconds: the larger of `least_s` and GROWTH times the longest duration of `call` so far."""
        return max(self._least_s, GROWTH * self._longest[call])

    def note(self, call: str, seconds: float) -> None:
        """Record the duration of a completed `call`."""
        self._longest[call] = max(self._longest[call], seconds)


def format_ranks(numbers: list[int]) -> str:
    """`rank 3`, `ranks 0, 3 and 5`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
