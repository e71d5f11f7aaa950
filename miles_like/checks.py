"""What was found out about a run before it began: one finding a subject, in a sentence where something is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    OK = "ok"
    WRONG = "wrong"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. text: of WRONG what is wrong and the remedy, of NOT_CHECKED why, of OK nothing."""

    name: str
    outcome: Outcome = Outcome.OK
    text: str = ""


class NotCheckedError(Exception):
    """Raised by a check that cannot be made from here; its text says why."""


def checked(name: str, check: Callable[[], object]) -> Check:
    """The finding of calling `check`: WRONG where it raises ValueError, RuntimeError or OSError."""
    try:
        check()
    except NotCheckedError as e:
        return Check(name, Outcome.NOT_CHECKED, str(e))
    except (ValueError, RuntimeError, OSError) as e:
        words = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) and e.filename and e.strerror else str(e)
        return Check(name, Outcome.WRONG, " ".join(words.split()) or type(e).__name__)
    return Check(name)


def refuse_wrong(checks: Iterable[Check]) -> None:
    """Raises ValueError with all that is wrong, each thing once."""
    wrong = list(dict.fromkeys(c.text for c in checks if c.outcome is Outcome.WRONG))
    if len(wrong) > 1:
        raise ValueError(f"{len(wrong)} things are wrong: " + "; ".join(f"({i}) {w}" for i, w in enumerate(wrong, 1)))
    if wrong:
        raise ValueError(wrong[0])


def not_checked(checks: Iterable[Check]) -> list[str]:
    """A line for each thing that was not checked."""
    return [f"{c.name}: {c.text}" for c in checks if c.outcome is Outcome.NOT_CHECKED]
