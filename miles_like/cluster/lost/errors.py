"""Ranks that are lost: which, where and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRank:
    """One rank whose process has ended, or does not answer."""

    role: str  # trainer, critic, reference
    index: int
    node: str  # address of its node
    why: str  # a clause


class RanksLostError(RuntimeError):
    """Ranks are lost, and with them the weights of their role."""

    def __init__(self, what: str, remedy: str, lost: Sequence[LostRank]) -> None:
        """what: names the ranks and the call that was under way, without the remedy."""
        super().__init__(f"{what}: {remedy}")
        self.what, self.lost = what, tuple(lost)


def lost_ranks_error(error: BaseException | None) -> RanksLostError | None:
    """The RanksLostError that `error` is or follows from; None: ranks are not its cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, RanksLostError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
