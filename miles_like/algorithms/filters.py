"""Group filters: which scored groups are trained on."""

from __future__ import annotations

from functools import partial

from miles_like.algorithms.advantages.remax import why_no_baseline
from miles_like.plugins import load
from miles_like.protocols import GroupFilter
from miles_like.types import SampleGroup

EQUAL = "all rewards equal"
EQUAL_REWARDS = {r: f"{EQUAL} ({r:g})" for r in (-1.0, 0.0, 1.0)}  # the value says whether a prompt is too hard or easy


def nonzero_std(group: SampleGroup) -> str | None:
    """Discards a group whose rewards are all equal, or which has fewer than two: its group-relative advantages are 0
    (dynamic sampling, DAPO, arXiv:2503.14476, 3.2). Raises ValueError for a sample without a reward."""
    found = set(group.rewards)
    if len(found) > 1:
        return None
    # of other values there may be any number, and each reason stays in the ledger
    return next((EQUAL_REWARDS[r] for r in found if r in EQUAL_REWARDS), EQUAL)


def keep_all(group: SampleGroup) -> None:
    """Discards no group."""


FILTERS: dict[str, GroupFilter] = {"off": keep_all, "nonzero_std": nonzero_std}


def make_filter(name: str, *, greedy: bool = False) -> GroupFilter:
    """The filter of that name or import path; with `greedy` it also discards groups without a scored greedy answer, or
    with nothing beside it. Raises ValueError as `load`; the filter raises it for a result that is
    neither None nor a string."""
    known = {key: partial(FILTERS.__getitem__, key) for key in FILTERS}
    found: GroupFilter = load(name, GroupFilter, key="algorithm.filter", known=known)

    def checked(group: SampleGroup) -> str | None:
        if greedy and (missing := why_no_baseline(group)) is not None:
            return missing
        reason = found(group)
        if reason is not None and not isinstance(reason, str):
            raise ValueError(
                f"algorithm.filter = {name!r} returned {reason!r}: return None to keep a group, or a reason"
            )
        return reason

    return checked
