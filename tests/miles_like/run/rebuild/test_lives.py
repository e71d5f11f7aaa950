"""A run goes on after losses of ranks, within its budget, and after no other error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import pytest

from miles_like.run.rebuild.budget import RebuildBudget
from miles_like.run.rebuild.lives import lost_ranks_error, run_through_losses
from miles_like.types import LostRank, RanksLostError
from tests.support.refusals import refuses


def loss(what: str) -> RanksLostError:
    return RanksLostError(what, "see logs/", [LostRank(role="trainer", index=1, node="10.0.0.2", why="died")])


@dataclass
class Ranks:
    """Are lost once a life asks, where they are to be."""

    dies: RanksLostError | None = None

    async def lost(self) -> RanksLostError:
        if self.dies is None:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        assert self.dies is not None
        return self.dies


@dataclass
class Made:
    """A life for each of `ends`: an error that it raises, None for the end of the run, or ranks that die while nothing
    asks them. An error of `rebuilds` is raised where ranks are rebuilt."""

    ends: list[Exception | Ranks | None]
    rebuilds: list[Exception | None] = field(default_factory=list)
    happened: list[str] = field(default_factory=list)
    lost: RanksLostError | None = None

    @property
    def ranks(self) -> Sequence[Ranks]:
        now = self.ends[0]
        return [now if isinstance(now, Ranks) else Ranks()]

    async def run(self) -> None:
        now = self.ends.pop(0)
        try:
            if isinstance(now, Ranks):
                await asyncio.Event().wait()
            if isinstance(now, Exception):
                raise now
            self.happened.append("end")
        finally:
            self.happened.append("closed")

    async def next(self) -> Self:
        self.happened.append("rebuilt")
        if self.rebuilds and (e := self.rebuilds.pop(0)) is not None:
            raise e
        return self


def ran(life: Made, limit: int = 3) -> list[str]:
    said: list[str] = []
    asyncio.run(asyncio.wait_for(run_through_losses(life, RebuildBudget(limit, 60.0), said.append), 10))
    return said


def test_ranks_are_rebuilt_after_a_call_lost_them_while_idle_and_while_they_are_rebuilt() -> None:
    wrapped = RuntimeError("no experience")
    wrapped.__cause__ = loss("b")
    life = Made([loss("a"), wrapped, Ranks(loss("idle")), None], rebuilds=[None, loss("again"), None])
    said = ran(life, limit=4)
    assert (
        life.happened.count("rebuilt") == 4
        and life.happened[-2:] == ["end", "closed"]
        and life.happened.count("closed") == 4
    )
    assert [text.rpartition(": ")[2] for text in said] == ["a", "b", "again", "idle"]
    assert "4 of at most 4 within 60 s" in said[-1]


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: an illegal memory access"), ValueError("nan")])
def test_another_error_ends_the_run(error: Exception) -> None:
    life = Made([error, None])
    with pytest.raises(type(error), match=str(error)):
        ran(life)
    assert life.happened == ["closed"]


def test_without_rebuilds_the_first_loss_ends_the_run_as_it_is() -> None:
    with pytest.raises(RanksLostError, match="a: see logs/"):
        ran(Made([loss("a"), None]), limit=0)


def test_a_run_that_loses_ranks_too_often_names_each_loss() -> None:
    with refuses(RuntimeError, "2 times within 60 s", "cluster.rebuilds = 1", "1. a", "2. b", "--resume"):
        ran(Made([loss("a"), loss("b"), None]), limit=1)


def test_losses_are_counted_within_the_window() -> None:
    clock = [0.0]
    budget = RebuildBudget(1, 60.0, clock=lambda: clock[0])
    budget.spend(loss("a"))
    assert not budget.left
    clock[0] = 60.0
    assert budget.left and "1 of at most 1" in budget.spend(loss("b"))


def test_an_error_that_follows_from_lost_ranks_is_told_from_others() -> None:
    lost = loss("a")

    def raised() -> Exception:
        try:
            try:
                raise lost
            except RuntimeError as e:
                raise ValueError("the experience of step 3 is missing") from e
        except ValueError as e:
            return e

    assert lost_ranks_error(raised()) is lost and lost_ranks_error(lost) is lost
    assert lost_ranks_error(RuntimeError("CUDA error")) is None
