"""Which scored groups are worth training on."""

from __future__ import annotations

from functools import partial

from miles_like.by_import_path import load
from miles_like.protocols import GroupFilter
from miles_like.types import SampleGroup


def nonzero_std(group: SampleGroup) -> str | None:
    """Left out where all rewards are equal, or there are fewer than two: an advantage relative to the group is then 0
    (dynamic sampling, DAPO, arXiv:2503.14476, 3.2). Raises ValueError for a sample that was not scored."""
    return None if len(set(group.rewards)) > 1 else "all rewards equal"


def keep_all(group: SampleGroup) -> None:
    """None is left out."""


FILTERS: dict[str, GroupFilter] = {"off": keep_all, "nonzero_std": nonzero_std}


def make_filter(name: str) -> GroupFilter:
    """The filter of that name or import path. Raises ValueError for one that cannot be had."""
    known = {key: partial(FILTERS.__getitem__, key) for key in FILTERS}
    found: GroupFilter = load(name, GroupFilter, key="algorithm.filter", known=known)

    def told(group: SampleGroup) -> str | None:
        reason = found(group)
        if reason is not None and not isinstance(reason, str):
            raise ValueError(f"algorithm.filter = {name!r} said {reason!r}: return None to keep a group, or why not")
        return reason

    return told
