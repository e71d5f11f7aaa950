"""Results of the checks before a run: one per subject, with a sentence where the check failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    OK = "ok"
    WRONG = "wrong"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check. text: for WRONG the fault and the remedy, for NOT_CHECKED the reason, for OK a remark,
    or empty."""

    name: str
    outcome: Outcome = Outcome.OK
    text: str = ""


class NotCheckedError(Exception):
    """Raised by a check that cannot be made here, with the reason."""


def run_check(name: str, check: Callable[[], object]) -> CheckResult:
    """Call `check` and return the result: WRONG where it raises ValueError, RuntimeError or OSError."""
    try:
        check()
    except NotCheckedError as e:
        return CheckResult(name, Outcome.NOT_CHECKED, str(e))
    except (ValueError, RuntimeError, OSError) as e:
        words = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) and e.filename and e.strerror else str(e)
        return CheckResult(name, Outcome.WRONG, " ".join(words.split()) or type(e).__name__)
    return CheckResult(name)


def raise_failures(checks: Iterable[CheckResult]) -> None:
    """Raises ValueError with the texts of all failed checks, without repeats."""
    wrong = list(dict.fromkeys(c.text for c in checks if c.outcome is Outcome.WRONG))
    if len(wrong) > 1:
        raise ValueError(f"{len(wrong)} problems found: " + "; ".join(f"({i}) {w}" for i, w in enumerate(wrong, 1)))
    if wrong:
        raise ValueError(wrong[0])


def describe_unchecked(checks: Iterable[CheckResult]) -> list[str]:
    """One line for each check that was not made."""
    return [f"{c.name}: {c.text}" for c in checks if c.outcome is Outcome.NOT_CHECKED]


def describe_remarks(checks: Iterable[CheckResult]) -> list[str]:
    """One line for each remark, without repeats."""
    return list(dict.fromkeys(c.text for c in checks if c.outcome is Outcome.OK and c.text))
