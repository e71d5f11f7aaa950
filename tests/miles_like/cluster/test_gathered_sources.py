"""Law: the ranks of a group gather the chunks of all their sources in one order, whatever the sources wait for, and
each ends when those that it helps have ended.

Ranks are threads at one store, and a collective is a meeting of those that help. Why it must hold: ranks that open two
collectives in different orders wait for each other without end. Not covered: Megatron's collectives
(tests/rollout/publish/sources/test_weights_from_sources.py).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_bridge.device.signals import StoreSignals
from miles_like.cluster import gathering
from miles_like.cluster.gathering import Gathering
from miles_like.types import NamedTensor, PublishReport
from rollout.publish.sources.part import Part

SOURCES = (0, 1)  # ranks; rank 2 helps both, rank 3 none
CHUNKS = (5, 9)


class _Group:
    """WeightSources of one rank."""

    ranks, group = SOURCES, 0

    def __init__(self, rank: int, meetings: list[threading.Barrier]) -> None:
        self.rank, self.helps = rank, frozenset() if rank == 3 else frozenset((0, 1))
        self._meetings, self.gathered = meetings, list[tuple[int, int]]()

    def chunks(self, source: int) -> int:
        return CHUNKS[source]

    def names(self, source: int) -> Iterator[str]:
        yield from (f"{source} {chunk}" for chunk in range(CHUNKS[source]))

    def gather(self, source: int, chunk: int) -> list[NamedTensor]:
        self.gathered.append((source, chunk))
        self._meetings[source].wait(20)  # one for each source: ranks in another order are in different ones
        return [NamedTensor(f"{source} {chunk}", torch.zeros(1))] if self.rank == SOURCES[source] else []


class _Ranks:
    def __init__(self) -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
        self.store, meetings = store, [threading.Barrier(3) for _ in SOURCES]
        self.groups = [_Group(rank, meetings) for rank in range(4)]
        self.gatherings = [Gathering(StoreSignals(store, 4), rank) for rank in range(4)]

    def publish(self, work: Any, ranks: int = 4) -> list[Any]:
        """What each rank returns, or its error."""
        with ThreadPoolExecutor(ranks) as threads:
            futures = [
                threads.submit(self.gatherings[r].publish, self.groups[r], work, version=1) for r in range(ranks)
            ]
            return [f.exception(60) or f.result() for f in futures]


def report(nbytes: int) -> PublishReport:
    return PublishReport(version=1, bytes=nbytes, seconds=0.0, pause_seconds=0.0)


def test_ranks_gather_in_one_order_and_a_source_gets_its_chunks() -> None:
    ranks, turn = _Ranks(), threading.Lock()

    def work(part: Part) -> PublishReport:
        pauses, names = random.Random(part.number), []
        for item in part.weights:
            names.append(item.name)
            with turn:  # it waits for the other source
                time.sleep(pauses.choice((0.0, 0.002, 0.005)))
        assert names == list(ranks.groups[0].names(part.number))
        return report(len(names))

    keys = []
    for _ in range(3):
        found = ranks.publish(work)
        assert [r.bytes for r in found] == [*CHUNKS, 0, 0]
        keys.append(ranks.store.num_keys())
    orders = [group.gathered for group in ranks.groups]
    assert orders[0] == orders[1] == orders[2] and len(orders[0]) == 3 * sum(CHUNKS) and not orders[3]
    assert keys[1] == keys[2], "texts do not pile up"


def test_a_source_that_stops_early_ends_the_others_calls() -> None:
    ranks = _Ranks()

    def work(part: Part) -> PublishReport:
        if part.number == 1:
            next(part.weights)
            raise ValueError("cannot be encoded")
        return report(sum(1 for _ in part.weights))

    found = ranks.publish(work)
    assert isinstance(found[1], ValueError) and [r.bytes for r in (found[0], found[2], found[3])] == [CHUNKS[0], 0, 0]
    assert [r.bytes for r in ranks.publish(lambda part: report(7))] == [7, 7, 0, 0]


def test_a_collective_that_fails_ends_the_source_s_work_with_its_error() -> None:
    ranks = _Ranks()

    def gather(source: int, chunk: int) -> list[NamedTensor]:
        raise RuntimeError("Connection closed by peer")

    for group in ranks.groups:
        group.gather = gather  # type: ignore[method-assign]
    found = ranks.publish(lambda part: report(sum(1 for _ in part.weights)))
    assert [str(e) for e in found[:3]] == ["Connection closed by peer"] * 3


@pytest.mark.slow
def test_a_source_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_PIECE_S", 0.1)
    ranks, gone = _Ranks(), threading.Event()

    def work(part: Part) -> PublishReport:
        if part.number == 1:
            assert gone.wait(60), "the others wait for it"
            return report(0)
        part.abandon([1])
        return report(1)

    with ThreadPoolExecutor(4) as threads:
        calls = [threads.submit(ranks.gatherings[r].publish, ranks.groups[r], work, version=1) for r in range(4)]
        assert [calls[rank].result(40).bytes for rank in (0, 2, 3)] == [1, 0, 0]
        gone.set()
        assert calls[1].result(40).bytes == 0
