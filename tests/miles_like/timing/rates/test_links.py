"""Collectives against counts over pairs of ranks, and against published measurements.

Not covered: contention between groups, algorithms other than rings.
"""

from __future__ import annotations

import pytest

from miles_like.device_table import DEVICES, device
from miles_like.timing.rates.calibration import LATENCY, NETWORK, NVLINK
from miles_like.timing.rates.links import (
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    group_of,
    latency,
    link,
    reduce_scatter,
    ring_rate,
    send,
)
from tests.support.refusals import refuses

H100 = device("H100")
# Bus bandwidth of NCCL's all-reduce over the GPUs of a node, GB/s, by MiB: "Azure/AI-benchmarking-guide", Azure_Results
AZURE = {
    ("A100", 8): {64: 166.63, 512: 221.58, 8192: 231.58},
    ("H200", 8): {64: 368.11, 512: 442.72, 8192: 479.98},
    ("GB200", 4): {64: 550.73, 512: 618.74, 8192: 679.61},
}


@pytest.mark.parametrize(("name", "ranks"), AZURE)
def test_a_large_all_reduce_takes_what_azure_measured(name: str, ranks: int) -> None:
    """Within 35 %: H200 reduces in its switches, which rings do not."""
    group = Group(ranks, ranks)
    for mib, bus in AZURE[name, ranks].items():
        nbytes = mib * 2**20
        seen = 2 * nbytes * (ranks - 1) / ranks / (bus * 1e9)
        assert all_reduce(nbytes, group, device(name)) == pytest.approx(seen, rel=0.35), mib


def test_groups_follow_megatron_s_order_of_ranks() -> None:
    """tp-cp-ep-dp-pp over nodes of 8: tensor-parallel ranks are neighbours, pipeline stages farthest apart."""
    assert group_of(8, 1, H100) == Group(8, 8) and group_of(8, 1, H100).domains == 1
    assert group_of(16, 1, H100) == Group(16, 8) and group_of(16, 1, H100).domains == 2
    assert group_of(2, 8, H100) == Group(2, 1)  # data-parallel ranks of tp = 8 are on different nodes
    assert group_of(4, 2, H100) == Group(4, 4) and group_of(8, 2, H100) == Group(8, 4)
    assert group_of(16, 1, device("GB200")) == Group(16, 16)
    with refuses(ValueError, 0):
        group_of(0, 1, H100)


def _bytes_by_link(ranks: int, local: int, nbytes: float) -> tuple[float, float]:
    """(within its domain, out of it) that rank 0 sends in an all-to-all, counted pair by pair."""
    near = sum(nbytes / ranks for other in range(1, ranks) if other // local == 0)
    far = sum(nbytes / ranks for other in range(1, ranks) if other // local != 0)
    return near, far


@pytest.mark.parametrize("ranks", [2, 8, 16, 64])
def test_an_all_to_all_takes_its_slower_link(ranks: int) -> None:
    group = group_of(ranks, 1, H100)
    near, far = _bytes_by_link(ranks, 8, 1e9)
    wanted = max(near / (NVLINK * H100.intra), far / (NETWORK * H100.inter))
    assert all_to_all(1e9, group, H100) - latency(group) == pytest.approx(wanted)


@pytest.mark.parametrize("name", DEVICES)
def test_rings_move_what_their_definition_says(name: str) -> None:
    """Each of n - 1 steps passes a shard of B / n through every rank: simulated step by step."""
    one = device(name)
    for ranks in (2, 4, 8, 32):
        group = group_of(ranks, 1, one)
        moved = sum(1e9 / ranks for _ in range(ranks - 1))
        wanted = moved / ring_rate(group, one)
        assert all_gather(1e9, group, one) - latency(group) == pytest.approx(wanted)
        assert reduce_scatter(1e9, group, one) == all_gather(1e9, group, one)
        both = all_reduce(1e9, group, one) - latency(group)
        assert both == pytest.approx(2 * wanted)


def test_a_ring_between_nodes_uses_all_their_network_links() -> None:
    assert ring_rate(Group(16, 8), H100) == pytest.approx(min(NVLINK * 450e9, 8 * NETWORK * 50e9))
    assert ring_rate(Group(2, 1), H100) == pytest.approx(NETWORK * 50e9)
    assert ring_rate(Group(8, 8), H100) > ring_rate(Group(8, 2), H100) > ring_rate(Group(8, 1), H100)


def test_seconds_grow_with_bytes_and_domains_and_one_rank_sends_nothing() -> None:
    for collective in (all_gather, all_reduce, all_to_all, broadcast):
        for group in (Group(8, 8), Group(16, 8), Group(64, 8)):
            times = [collective(n, group, H100) for n in (0.0, 1e6, 1e8, 1e10)]
            assert times == sorted(times) and times[0] >= LATENCY
        assert collective(1e9, Group(1, 1), H100) == 0.0
        assert collective(1e8, Group(16, 8), H100) > collective(1e8, Group(8, 8), H100)
    assert send(1e9, H100, near=True) < send(1e9, H100, near=False)
    assert broadcast(1e12, Group(257, 1), H100) == pytest.approx(1e12 / link(H100, near=False), rel=1e-4)
