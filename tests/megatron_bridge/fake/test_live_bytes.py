"""The count of live bytes, on real tensors whose sizes are known.

Not covered: that every operator returns the storages it makes, which tests/megatron_bridge/fake/test_measured_ranks.py
holds for a trainer's against torch's allocator.
"""

from __future__ import annotations

import torch

from megatron_bridge.fake.live_bytes import PINNED, LiveBytes, allocated_pinned

KIB = 1 << 10


def kib(n: int) -> torch.Tensor:
    return torch.zeros(n * KIB, dtype=torch.uint8)


def test_a_storage_counts_once_and_until_its_last_tensor_is_gone() -> None:
    live = LiveBytes()
    with live:
        x = kib(4)
        views = [x[:100], x.view(2, -1), x.detach()]
        assert live.device == {"other": 4 * KIB}
        del x, views[1:]
        assert live.device == {"other": 4 * KIB}
        views.clear()
        assert live.device == {}


def test_the_peak_is_of_a_phase_and_by_part() -> None:
    live = LiveBytes()
    with live:
        with live.part("parameters"):
            kept = kib(1)
        live.begin_phase()
        with live.part("activations"):
            first, second = kib(2), kib(3)
            del first
            third = kib(1)
        assert live.peak == {"parameters": KIB, "activations": 5 * KIB}
        assert live.device == {"parameters": KIB, "activations": 4 * KIB}
        del second, third
        live.begin_phase()
        assert live.peak == live.device == {"parameters": KIB}
        live.assign([kept], "masters")
        assert live.device == {"masters": KIB}


def test_gradients_are_counted_where_backward_makes_them() -> None:
    live = LiveBytes()
    x = torch.ones(KIB, requires_grad=True)
    with live, live.part("step"):
        x.exp().sum().backward()  # keeps its result for the gradient
        assert x.grad is not None
        assert live.device["step"] == x.grad.nbytes
        assert live.peak["step"] >= 2 * x.nbytes


def test_a_resized_storage_has_its_new_size() -> None:
    live = LiveBytes()
    with live:
        x = kib(4)
        storage = x.untyped_storage()
        storage.resize_(0)
        live.measure(storage)
        assert live.device == {}
        storage.resize_(4 * KIB)
        live.measure(storage)
        assert live.device == {"other": 4 * KIB}


def test_the_host_is_apart() -> None:
    live = LiveBytes()
    with live, live.part("parameters"):
        x = kib(2)
        with live.on_host():
            copy = x.clone()
        assert (live.device, live.host) == ({"parameters": 2 * KIB}, {"parameters": 2 * KIB})
        live.assign([copy], "moments")
        assert live.host == {"moments": 2 * KIB}
    by_type = LiveBytes(host="cpu")
    with by_type:
        y = kib(2)
        assert (by_type.device, by_type.host) == ({}, {"other": y.nbytes})


def test_pinned_memory_is_allocated_in_powers_of_two() -> None:
    """CachingHostAllocator of torch 2.13 rounds every allocation up; PYTORCH_CUDA_ALLOC_CONF could limit it."""
    assert [allocated_pinned(n) for n in (0, 1, 1024, 1025, 3 << 30)] == [0, 1, 1024, 2048, 4 << 30]
    live = LiveBytes(host="cpu")
    from megatron_bridge.fake.substitutes.tensors import RankMode

    with RankMode(torch.device("cpu")), live:
        pinned = torch.empty(1025, dtype=torch.uint8, pin_memory=True)
        assert live.host == {"other": 1025, PINNED: 1023}
        del pinned
        assert live.host == {}
