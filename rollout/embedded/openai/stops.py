"""Stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Passes a text on up to the first stop string. What could still become one is held back until it is decided.

    The text ends at the stop string that is complete first; of two that are complete with the same character, at the
    longer one. So where a text ends does not depend on the pieces that it arrives in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none of them empty."""
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None  # the stop string that was found
        self.after = ""  # what the last piece had behind it

    def push(self, piece: str) -> str:
        """The text that is now certain to be in front of every stop string."""
        assert self.matched is None, "the text has ended"
        text = self._held + piece
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if found:
            end, start = min(found)
            self.matched, self.after, self._held = text[start:end], text[end:], ""
            return text[:start]
        safe = len(text) - self._open(text)
        self._held = text[safe:]
        return text[:safe]

    def flush(self) -> str:
        """What is held back, for the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _open(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-n:]
            if any(s.startswith(end) for s in self._stops):
                return n
        return 0
