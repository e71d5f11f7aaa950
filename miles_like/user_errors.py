"""What users' functions raised or returned, in few words: it goes into the run's last sentence and its logs, and may
hold a whole response."""

from __future__ import annotations

MOST_CHARS = 500


def raised(error: BaseException) -> str:
    """Its class and what it says, on one line."""
    try:
        text = str(error)
    except Exception:  # the user's class may fail even here
        text = ""
    said = _shortened(text)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def shown(value: object) -> str:
    """Its repr, on one line."""
    try:
        return _shortened(repr(value))
    except Exception:  # as above; so does an int of more digits than Python writes
        return f"one of {type(value).__name__}"


def _shortened(text: str) -> str:
    said = " ".join(text[: 4 * MOST_CHARS].split())
    return said if len(said) <= MOST_CHARS and len(text) <= 4 * MOST_CHARS else f"{said[:MOST_CHARS]}..."
