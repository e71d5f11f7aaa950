"""How long remote calls may take: a bound that grows with what the calls of a run have taken so far."""

from __future__ import annotations

from collections import defaultdict

GROWTH = 10.0  # a call may take so many times the longest one before it


class CallDeadlines:
    """Of calls by name. least_s: the bound of a call that is the first of its name, or follows short ones."""

    def __init__(self, least_s: float) -> None:
        self._least_s = least_s
        self._longest: defaultdict[str, float] = defaultdict(float)

    def limit(self, call: str) -> float:
        """Seconds: `least_s`, or GROWTH times the longest that `call` has taken, if that is more."""
        return max(self._least_s, GROWTH * self._longest[call])

    def note(self, call: str, seconds: float) -> None:
        """`call` was answered after so many seconds."""
        self._longest[call] = max(self._longest[call], seconds)


def listed(numbers: list[int]) -> str:
    """`rank 3`, `ranks 0, 3 and 5`."""
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    return f"ranks {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
