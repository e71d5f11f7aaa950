"""A run that goes on where it loses trainer ranks: its ranks are rebuilt, its servers stay.

A life of a run is the time between two losses. Each begins at the last checkpoint of the one before, as a run that is
resumed does, with the same driver process, the same event loop and the same servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from miles_like.run.rebuild.budget import RebuildBudget
from miles_like.run.watched.orders import GoingBack
from miles_like.types import RanksLostError


class WatchedRanks(Protocol):
    """The ranks of one role (miles_like.cluster.trainer_ranks.RayTrainer)."""

    async def lost(self) -> RanksLostError:
        """Waits until a rank is lost."""


class Life(Protocol):
    """A run between two losses of ranks."""

    lost: RanksLostError | None  # set before `run` is cancelled

    @property
    def ranks(self) -> Sequence[WatchedRanks]: ...
    async def run(self) -> None:
        """To the end of the run. Raises RanksLostError, or an error that follows from one."""

    async def next(self) -> Self:
        """The run from its last checkpoint, on ranks that are started for it. Raises as `run`; it may be called
        again."""

    async def back(self, going: GoingBack) -> Self:
        """The run from its best checkpoint, under the next step's number. Raises Stopped where it went back too often,
        and as `next`."""


async def run_through_losses(life: Life, budget: RebuildBudget, say: Callable[[str], None]) -> None:
    """Runs a life, and another after each loss of ranks, also of those that are just rebuilt, and where the run goes
    back. Raises as `RebuildBudget.spend`, and every other error of a life."""
    lost: RanksLostError | None = None
    going: GoingBack | None = None
    while True:
        try:
            if lost is not None:
                life, lost, going = await life.next(), None, None  # an error holds what its frames do: the life before
            elif going is not None:
                life, going = await life.back(going), None
            await unless_lost(life)
            return
        except GoingBack as e:
            going = e
            continue
        except Exception as e:
            if (lost := lost_ranks_error(e)) is None:
                raise
        say(f"Trainer ranks are rebuilt ({budget.spend(lost)}): {lost.what}")


async def unless_lost(life: Life) -> None:
    """Runs a life to its end, or until a rank is lost, also while no call waits for the ranks. It is then cancelled,
    and RanksLostError raised."""
    task = asyncio.ensure_future(life.run())
    watches = [asyncio.ensure_future(of.lost()) for of in life.ranks]
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            life.lost = next(watch.result() for watch in watches if watch.done())
            raise life.lost
        await task
    finally:
        for one in (task, *watches):
            one.cancel()
        await asyncio.wait({task, *watches})
        for one in (task, *watches):
            if not one.cancelled():
                one.exception()  # seen: another error is raised in its place


def lost_ranks_error(error: BaseException | None) -> RanksLostError | None:
    """The RanksLostError that `error` is or follows from; None: ranks are not its cause."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, RanksLostError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return None
