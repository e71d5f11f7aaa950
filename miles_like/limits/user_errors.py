"""Short one-line descriptions of what users' functions raised or returned, for error messages and logs. The full text
may hold a whole response."""

from __future__ import annotations

MOST_CHARS = 500


def raised(error: BaseException) -> str:
    """The error's class and message, on one line."""
    try:
        text = str(error)
    except Exception:  # the user's class may fail even here
        text = ""
    message = _shortened(text)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def shown(value: object) -> str:
    """The value's repr, on one line."""
    try:
        return _shortened(repr(value))
    except Exception:  # as above; also raised for an int of more digits than Python converts
        return f"one of {type(value).__name__}"


def _shortened(text: str) -> str:
    line = " ".join(text[: 4 * MOST_CHARS].split())
    return line if len(line) <= MOST_CHARS and len(text) <= 4 * MOST_CHARS else f"{line[:MOST_CHARS]}..."
