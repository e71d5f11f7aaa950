"""Meetings and texts of ranks outside of collectives. Ranks are threads at one store.

Not covered here: processes (test_slow_disks.py), a rank 0 that ends (tests/miles_like/cluster/test_pacing.py).
"""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_bridge.device.signals import StoreSignals

RANKS, MEETINGS = 4, 30


def test_no_rank_leaves_a_meeting_before_the_last_has_come_and_keys_do_not_pile_up() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    arrived, early = [0] * RANKS, list[tuple[int, int]]()

    def rank(number: int) -> None:
        signals, pauses = StoreSignals(store, RANKS), random.Random(number)
        for meeting in range(1, MEETINGS + 1):
            time.sleep(pauses.choice((0.0, 0.0, 0.002)))
            arrived[number] = meeting
            signals.meet()
            if min(arrived) < meeting:
                early.append((number, meeting))

    keys = store.num_keys()
    threads = [threading.Thread(target=rank, args=(n,), daemon=True) for n in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert arrived == [MEETINGS] * RANKS and not early
    assert store.num_keys() <= keys + 2


def test_a_rank_that_is_alone_does_not_wait() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    keys, signals = store.num_keys(), StoreSignals(store, 1)
    signals.meet()
    assert store.num_keys() == keys


def test_a_text_wakes_its_reader_and_none_is_there_before_and_after() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    one, other = (StoreSignals(store, 2).board("b") for _ in range(2))
    keys = store.num_keys()
    assert other.read("text", 0) is None and StoreSignals(store, 2).board("c").read("text", 0) is None
    read: list[str | None] = []
    reader = threading.Thread(target=lambda: read.append(other.read("text", 60)), daemon=True)
    reader.start()
    time.sleep(0.05)
    assert not read
    one.put("text", "a b")
    reader.join(20)
    assert read == ["a b"] and [b.number("n") for b in (one, other, one)] == [1, 2, 3]
    one.remove("text")
    one.remove("n")
    assert other.read("text", 0) is None and store.num_keys() == keys
    assert other.read("text", 0.2) is None, "a wait that reaches its limit"
    one.put("text", "c")
    assert other.read("text", 60) == "c", "the client of a wait that reached its limit is still of use"
