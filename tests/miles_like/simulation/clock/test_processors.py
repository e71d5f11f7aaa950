"""Work on shared processors: none is lost or gained, and alone it takes its time.

Not covered: how far a real scheduler is from fair shares.
"""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_like.simulation.clock.processors import Processors
from miles_like.simulation.clock.virtual_time import now, run_virtual

JOB = st.tuples(st.floats(0, 5), st.floats(0.01, 8), st.floats(0.1, 4))  # begins, seconds, cores


async def run_jobs(processors: Processors, jobs: list[tuple[float, float, float]]) -> list[float]:
    """When each job ends."""

    async def job(begins: float, seconds: float, cores: float) -> float:
        await asyncio.sleep(begins)
        await processors.run(seconds, cores)
        return now()

    return await asyncio.gather(*(job(*j) for j in jobs))


def test_two_pieces_that_need_three_cores_of_two_advance_at_two_thirds() -> None:
    """The first: 4 s at 2/3 until the second's 2 s are done after 3 s, then its last 2 s alone."""
    ends = run_virtual(run_jobs(Processors(cores=2), [(0, 4, 2), (0, 2, 1)]))
    assert ends == pytest.approx([5, 3])


@settings(max_examples=60, deadline=None)
@given(jobs=st.lists(JOB, min_size=1, max_size=8), cores=st.floats(0.5, 6))
def test_processor_time_is_conserved(jobs: list[tuple[float, float, float]], cores: float) -> None:
    processors = Processors(cores=cores)
    ends = run_virtual(run_jobs(processors, jobs))
    total = sum(seconds * needed for _, seconds, needed in jobs)
    assert processors.used == pytest.approx(total, rel=1e-6)
    assert max(ends) - min(b for b, _, _ in jobs) >= total / cores * (1 - 1e-6)
    for end, (begins, seconds, needed) in zip(ends, jobs, strict=True):
        assert end >= begins + seconds * max(1, needed / cores) - 1e-6


@settings(max_examples=30, deadline=None)
@given(jobs=st.lists(JOB, min_size=1, max_size=8))
def test_on_separate_devices_nothing_delays_anything(jobs: list[tuple[float, float, float]]) -> None:
    ends = run_virtual(run_jobs(Processors(cores=math.inf), jobs))
    assert ends == pytest.approx([begins + seconds for begins, seconds, _ in jobs])


def test_work_that_is_stopped_reports_what_is_done() -> None:
    async def body() -> tuple[float, float]:
        processors = Processors(cores=1)
        work = processors.begin(10, 1)
        other = processors.begin(10, 1)
        await asyncio.sleep(4)
        done = processors.stop(work)
        await other.done
        return done, now()

    assert run_virtual(body()) == pytest.approx((2, 12))  # half speed for 4 s; the other's last 8 s alone
