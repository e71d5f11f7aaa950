"""Turns go round the sources that have buckets left, in the order of their numbers, and end with the last bucket; a
source that does not answer is named, and one that has failed ends the waits of the others.

Sources are threads at one store. Not covered: what they send (test_weights_from_sources.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_bridge.device.signals import StoreSignals
from rollout.publish.sources.turns import Kind, Silent, Stopped, Turns
from tests.support.refusals import refuses

RANKS = (0, 4, 8, 12)  # of the sources


@pytest.fixture
def sources() -> Callable[[float], list[Turns]]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))

    def made(limit_s: float) -> list[Turns]:
        signals = [StoreSignals(store, 16) for _ in RANKS]
        found = [Turns(i, RANKS, lambda s=s: s.board("t"), limit_s=limit_s) for i, s in enumerate(signals)]
        for turns in found:
            turns.begin(1)
        return found

    return made


def test_the_order_depends_on_the_numbers_alone_and_the_last_bucket_is_known(
    sources: Callable[[float], list[Turns]],
) -> None:
    buckets, sent = {0: 2, 2: 5, 3: 3}, list[tuple[int, bool]]()

    def run(turns: Turns, left: int) -> None:
        while left:
            active = turns.take()
            left -= 1
            if not left:
                active.remove(turns.number)
            sent.append((turns.number, not active))
            turns.pass_on(active)

    every = sources(60)
    threads = [threading.Thread(target=run, args=(every[i], n), daemon=True) for i, n in buckets.items()]
    for thread in threads:
        thread.start()
    every[0].open(sorted(buckets))
    for thread in threads:
        thread.join(60)
    assert [number for number, _ in sent] == [0, 2, 3, 0, 2, 3, 2, 3, 2, 2]
    assert [last for _, last in sent] == [False] * 9 + [True]


def test_without_a_bucket_no_turn_is_given(sources: Callable[[float], list[Turns]]) -> None:
    lead, *_ = sources(0.2)
    lead.open([])
    with refuses(Silent, 0, 0.2, "its log"):
        lead.take()


def test_the_source_that_keeps_its_turn_is_named(sources: Callable[[float], list[Turns]]) -> None:
    lead, _, third, _ = sources(0.2)
    lead.open([0, 1, 2])
    lead.pass_on([1, 2]) if lead.take() == [0, 1, 2] else None
    for waiting in (third, lead):
        with refuses(Silent, 4, 0.2, "rollout.request_timeout_s", "publish.parts_timeout_s") as caught:
            waiting.take() if waiting is third else waiting.hear({1, 2})
        assert caught.value.sources == [1]


def test_sources_that_have_not_begun_are_named(sources: Callable[[float], list[Turns]]) -> None:
    lead, *_ = sources(0.2)
    with refuses(Silent, "4, 12", 0.2) as caught:
        lead.hear({1, 3})
    assert caught.value.sources == [1, 3]


def test_a_stop_ends_every_wait(sources: Callable[[float], list[Turns]]) -> None:
    lead, second, *_ = sources(60)
    second.post(0, Kind.FAILED, error="server gone", lost=[])
    second.stop_turns([0])
    with pytest.raises(Stopped):
        lead.take()
    assert lead.hear({1, 2})["error"] == "server gone"
    lead.stop()
    with pytest.raises(Stopped):
        second.take()
    assert second.hear({0})["kind"] == Kind.STOP


def test_a_publication_does_not_read_the_messages_of_the_one_before(
    sources: Callable[[float], list[Turns]],
) -> None:
    lead, second, *_ = sources(0.2)
    lead.post(1, Kind.GO)
    lead.open([1])
    for turns in (lead, second):
        turns.begin(2)
    with pytest.raises(Silent):
        second.hear({0})
    with pytest.raises(Silent):
        second.take()
    lead.post(1, Kind.JOIN)
    assert second.hear({0})["kind"] == Kind.JOIN
