"""The causes of a wait add up to it, along the group that came last."""

from __future__ import annotations

import pytest

from miles_like.simulation.loop.ledger import SimLedger
from miles_like.simulation.loop.waits import CAUSES, causes
from miles_like.simulation.servers.samples import SimGroup, SimSample
from tests.support.refusals import refuses


def ended(group_id: int, *, admitted: float, started: float, ends: list[float], scored: float) -> SimGroup:
    samples = [SimSample(prompt_tokens=1, length=3, spans=[(0, 3)], started=started, ended=end) for end in ends]
    return SimGroup(group_id=group_id, samples=samples, needed=len(ends), admitted=admitted, scored=scored)


def test_a_wait_is_divided_along_the_group_that_was_scored_last() -> None:
    early = [ended(i, admitted=0, started=1, ends=[5.0] * 9, scored=5) for i in range(2)]
    late = ended(2, admitted=2, started=4, ends=[6.0, 11.0], scored=13)
    found = causes([*early, late], 1, 14)
    assert found == {"prompts": 1, "queue": 2, "sampling": 2, "tail": 5, "reward": 2, "order": 1}
    assert list(found) == list(CAUSES)


@pytest.mark.parametrize(("began", "taken"), [(0, 13), (5, 13), (12, 14), (13, 13), (20, 25)])
def test_causes_add_up_to_the_wait(began: float, taken: float) -> None:
    late = ended(2, admitted=2, started=4, ends=[6.0, 11.0], scored=13)
    assert sum(causes([late], began, taken).values()) == pytest.approx(taken - began)


def test_a_group_that_ends_twice_is_an_error() -> None:
    ledger = SimLedger()
    first, second = ledger.admit(), ledger.admit()
    ledger.train(first, 0)
    ledger.discard(second, "stale")
    assert ledger.outstanding == 0 and ledger.reasons == {"stale": 1}
    for group_id, again in ((first, "0"), (second, "stale")):
        with refuses(RuntimeError, group_id, again):
            ledger.discard(group_id, "filter")
    with refuses(RuntimeError, 9, 2):
        ledger.train(9, 1)
