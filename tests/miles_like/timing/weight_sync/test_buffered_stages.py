"""Stages with bounded buffers take what closed forms say for equal buckets, never less than the work of one resource,
and never longer with more buffers or faster stages.

Not covered: which times a path gives its stages (test_simulated_paths.py).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from miles_like.timing.weight_sync.pipeline import Chain, Stage, one_after_the_other, simulate
from tests.support.refusals import refuses

DRAWS = range(20)


def chain(rows: Sequence[Sequence[float]], *, buffers: int, resources: Sequence[str] | None = None) -> Chain:
    names = resources or [f"r{s}" for s in range(len(rows[0]))]
    stages = tuple(Stage(name=f"s{s}", resource=name, buffers=buffers) for s, name in enumerate(names))
    return Chain(stages=stages, seconds=rows)


def drawn(seed: int, stages: int = 4, buckets: int = 9) -> list[list[float]]:
    r = random.Random(seed)
    return [[r.uniform(0, 2) * (r.random() < 0.9) for _ in range(stages)] for _ in range(buckets)]


@pytest.mark.parametrize("n", [1, 2, 7])
def test_equal_buckets_take_their_closed_forms(n: int) -> None:
    """In place: the sum. One buffer: two neighbours never work at once. Two and more: the longest stage decides."""
    t = [1.0, 2.5, 0.5, 2.0]
    rows = [t] * n
    pair = max(a + b for a, b in itertools.pairwise(t))
    assert simulate([chain(rows, buffers=0)]).seconds == pytest.approx(n * sum(t))
    assert simulate([chain(rows, buffers=1)]).seconds == pytest.approx(sum(t) + (n - 1) * pair)
    for buffers in (2, 3, 100):
        assert simulate([chain(rows, buffers=buffers)]).seconds == pytest.approx(sum(t) + (n - 1) * max(t))


def walked(rows: Sequence[Sequence[float]], buffers: int) -> float:
    """The same pipeline from event to event: a stage starts its next bucket once the stage before has ended it and a
    buffer is free, which the next stage frees at its end of a bucket."""
    stages, now, until = len(rows[0]), 0.0, dict[int, float]()
    started, ended = [0] * stages, [0] * stages
    while ended[-1] < len(rows):
        for s in range(stages):
            ready = started[s] < (ended[s - 1] if s else len(rows))
            free = s == stages - 1 or started[s] - ended[s + 1] < buffers
            if s not in until and ready and free:
                until[s] = now + rows[started[s]][s]
                started[s] += 1
        now = min(until.values())
        for s in [s for s, end in until.items() if end == now]:
            del until[s]
            ended[s] += 1
    return now


@pytest.mark.parametrize("seed", DRAWS)
@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_unequal_buckets_take_what_a_walk_from_event_to_event_takes(seed: int, buffers: int) -> None:
    rows = drawn(seed)
    assert simulate([chain(rows, buffers=buffers)]).seconds == pytest.approx(walked(rows, buffers))


@pytest.mark.parametrize("seed", DRAWS)
def test_in_place_is_the_sum_and_each_buffer_helps_or_does_nothing(seed: int) -> None:
    rows = drawn(seed)
    times = [simulate([chain(rows, buffers=b)]).seconds for b in (0, 1, 2, 3, 100)]
    assert times[0] == pytest.approx(sum(map(sum, rows)))
    assert times == sorted(times, reverse=True)
    assert times[-1] >= max(sum(column) for column in zip(*rows, strict=True))


def test_many_small_buckets_approach_the_longest_stage() -> None:
    whole = [3.0, 5.0, 4.0]
    excess = []
    for n in (1, 10, 100, 1000):
        seconds = simulate([chain([[t / n for t in whole]] * n, buffers=2)]).seconds
        excess.append(seconds - max(whole))
    assert excess == sorted(excess, reverse=True) and 0 < excess[-1] < 0.01


@pytest.mark.parametrize("seed", DRAWS)
def test_no_resource_works_longer_than_the_whole_takes(seed: int) -> None:
    """Also where stages of several chains take turns on one resource; its work is the sum of theirs."""
    first, second = drawn(seed), drawn(seed + 1000, stages=3, buckets=5)
    found = simulate(
        [
            chain(first, buffers=2, resources=["a", "shared", "b", "c"]),
            chain(second, buffers=1, resources=["d", "shared", "b"]),
        ]
    )
    assert found.busy["shared"] == pytest.approx(sum(r[1] for r in first) + sum(r[1] for r in second))
    assert found.seconds >= max(found.busy.values()) - 1e-9
    assert found.busy[found.bound] == max(found.busy.values())


@pytest.mark.parametrize("seed", DRAWS)
def test_less_work_never_takes_longer(seed: int) -> None:
    """Turns are fixed beforehand: with a queue by arrival a faster stage could delay another chain."""
    r = random.Random(seed)
    names = (["a", "shared", "b", "c"], ["d", "shared", "b", "a"])
    rows = [drawn(seed + 1000 * c) for c in range(2)]
    less = [[[t * r.choice((1.0, 0.9, 0.5)) for t in row] for row in own] for own in rows]
    before, after = (
        simulate([chain(own, buffers=r2, resources=n) for own, n, r2 in zip(given, names, (2, 1), strict=True)]).seconds
        for given in (rows, less)
    )
    assert after <= before + 1e-9


def test_chains_share_a_resource_in_turns() -> None:
    """Two senders of equal buckets on one link take as long as one of twice as many, and without it half as long."""
    rows = [[1.0]] * 6
    alone = simulate([chain(rows, buffers=2)]).seconds
    assert simulate([chain(rows, buffers=2)] * 2).seconds == pytest.approx(2 * alone)
    apart = [chain(rows, buffers=2, resources=[name]) for name in "ab"]
    assert simulate(apart).seconds == pytest.approx(alone)


def test_turns_are_bucket_by_bucket_and_not_chain_by_chain() -> None:
    """Both senders prepare buckets in 2 s that pass the link in 1 s: neither waits for the other's last one."""
    rows = [[2.0, 1.0]] * 4
    found = simulate([chain(rows, buffers=2, resources=[name, "link"]) for name in "ab"])
    assert found.seconds == 4 * 2 + 1 + 1


def test_work_of_no_time_takes_no_turn() -> None:
    """A bucket without work for a resource does not wait for it, nor does another chain wait for that bucket."""
    slow = chain([[10.0, 0.0]], buffers=2, resources=["a", "shared"])
    quick = chain([[1.0, 1.0]], buffers=2, resources=["b", "shared"])
    found = simulate([slow, quick])
    assert found.seconds == 10.0 and found.busy["shared"] == 1.0


def test_what_follows_adds_up() -> None:
    one, two = simulate([chain([[1.0, 2.0]], buffers=2)]), simulate([chain([[4.0]], buffers=2)])
    both = one_after_the_other([one, two])
    assert both.seconds == 7.0 and both.busy == {"r0": 5.0, "r1": 2.0} and both.bound == "r0"
    assert simulate([]).seconds == 0 and simulate([]).bound == "nothing"


def test_impossible_chains_are_refused() -> None:
    with refuses(ValueError, "buffers", -1):
        chain([[1.0]], buffers=-1)
    with refuses(ValueError, -2.0):
        chain([[1.0, -2.0]], buffers=2)
    with refuses(ValueError, "[1.0]"):
        chain([[1.0, 2.0], [1.0]], buffers=2)
