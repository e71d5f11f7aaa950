"""Which nodes a run takes and in which order, and the names of their devices. No Ray is started; its part is in
tests/miles_like/cluster/test_run_nodes.py."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_like.nodes import members, reservation
from miles_like.nodes.members import Node, choose_nodes, in_order, suitable_nodes
from miles_like.nodes.reservation import devices_of, interface_of
from tests.support.refusals import refuses


def node(address: str, *, rack: str | None = None, gpus: int = 8, key: str = "rack") -> Node:
    labels = ((key, rack),) if rack is not None else ()
    return Node(id=f"id of {address}", address=address, host="h", gpus=gpus, cores=64, labels=labels)


def test_nodes_are_in_the_order_of_racks_and_of_addresses_as_numbers() -> None:
    """Not of Ray's ids, which are random, nor of the letters, by which 10.0.0.10 would come before 10.0.0.9."""
    wanted = [
        node("10.0.1.7", rack="r2"),
        node("10.0.0.9", rack="r10", key="example.com/rack"),
        node("10.0.0.10", rack="r10"),
        node("10.0.0.2"),
        node("10.0.0.11"),
        node("fd00::1"),
        node("host2"),
        node("host10"),
    ]
    for seed in range(20):
        mixed = random.Random(seed).sample(wanted, len(wanted))
        assert list(in_order(mixed)) == wanted


def test_a_rack_with_room_for_the_run_is_taken_whole() -> None:
    """By their order alone, a run of four would have three nodes of rack a and one of b."""
    cluster = in_order([node(f"10.0.0.{i}", rack="a" if i < 4 else "b") for i in range(1, 8)])
    assert [n.address for n in choose_nodes(cluster, 4)] == ["10.0.0.4", "10.0.0.5", "10.0.0.6", "10.0.0.7"]
    assert [n.rack for n in choose_nodes(cluster, 3)] == ["a"] * 3  # which leaves b to a larger run
    assert [n.rack for n in choose_nodes(cluster, 5)] == ["a", "b", "b", "b", "b"]


@given(st.lists(st.sampled_from(["a", "b", "c", "d", None]), min_size=1, max_size=9), st.integers(1, 9), st.randoms())
def test_a_run_crosses_as_few_racks_as_possible(racks: list[str | None], count: int, mixed: random.Random) -> None:
    """Against every choice; in whatever order Ray lists the nodes, which stay in the order of racks and addresses."""
    nodes = [node(f"10.0.0.{i}", rack=rack) for i, rack in enumerate(racks)]
    found = choose_nodes(in_order(mixed.sample(nodes, len(nodes))), count)
    assert found == choose_nodes(in_order(nodes), count) == in_order(found)
    assert len(found) == min(count, len(nodes)) == len(set(found))
    fewest = min(len({n.rack for n in some}) for some in itertools.combinations(nodes, len(found)))
    assert len({n.rack for n in found}) == fewest


def test_nodes_that_are_late_are_waited_for_with_a_line_and_a_missing_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    come: list[Any] = [(node("10.0.0.1", gpus=0), node("10.0.0.9"))] * 2
    monkeypatch.setattr(members, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(members, "living_nodes", lambda: come.pop(0) if len(come) > 1 else come[0])
    with refuses(ValueError, 2, 8, "10.0.0.9", "10.0.0.1", 0, "cluster.nodes", "cluster.timeout_s"):
        suitable_nodes(2, 8, timeout_s=0.2, say=said.append)
    assert len(said) == 1 and "1 of 2 nodes with 8 GPUs each" in said[0]
    come += [(*come[0], node("10.0.0.10"))]
    found = suitable_nodes(2, 8, timeout_s=5, say=said.append)
    assert [n.address for n in found] == ["10.0.0.9", "10.0.0.10"]
    monkeypatch.setattr(members, "is_local", lambda: True)
    with refuses(ValueError, 4, "cluster.nodes", "--ray-address"):
        suitable_nodes(4, 0, timeout_s=1e6, say=said.append)  # no node can join: at once


def test_devices_have_the_uuids_of_the_machine_or_derived_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reservation, "_nvidia_uuids", lambda: {0: "GPU-aaaa", 4: "GPU-bbbb"})
    assert [(d.index, d.uuid) for d in devices_of(["4", "0"], "n")] == [(0, "GPU-aaaa"), (4, "GPU-bbbb")]
    assert [(d.index, d.uuid) for d in devices_of(["GPU-bb"], "n")] == [(4, "GPU-bbbb")]
    with refuses(RuntimeError, "GPU-cc", "CUDA_VISIBLE_DEVICES", unrecorded="it names the host"):
        devices_of(["GPU-cc"], "n")
    monkeypatch.setattr(reservation, "_nvidia_uuids", dict)
    pretended = [devices_of(range(8), n) for n in ("n", "m", "n")]
    assert pretended[0] == pretended[2]
    assert len({d.uuid for devices in pretended[:2] for d in devices}) == 16


def test_the_interface_is_that_of_the_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.0.0.9") in ("lo", "lo0")
    assert interface_of("192.0.2.255") is None
