"""Storages are freed and restored in place: every tensor on one sees the same bits again.

Not covered: GPUs; TransformerEngine's quantized tensors, of which a stand-in with the same attribute is used.
"""

from __future__ import annotations

import torch

from megatron_bridge.device.host_memory import host_buffer
from megatron_bridge.device.storages import StorageSet, storages
from tests.support.refusals import refuses

CPU = torch.device("cpu")


def test_tensors_that_share_a_storage_share_it_afterwards() -> None:
    """A buffer, its views, a transposed one, and a parameter of which one is the data."""
    buffer = torch.arange(24, dtype=torch.float32)
    views = [buffer[2:8], buffer.view(4, 6).t(), buffer.view(torch.int32)[20:]]
    parameter = torch.nn.Parameter(buffer[:4])
    before, shapes = [v.clone() for v in (buffer, *views)], [v.stride() for v in views]
    found = storages([*views, buffer, parameter], CPU)
    assert len(found) == 1
    stored = StorageSet(found.values(), kept=True)
    host = host_buffer(stored.host_nbytes, CPU)
    for _ in range(2):
        stored.free(host)
        assert buffer.untyped_storage().nbytes() == 0 and stored.nbytes == 96
        stored.restore()
        stored.free_again()
        stored.restore()
        assert all(v.equal(x) for v, x in zip((buffer, *views), before, strict=True))
        assert [v.stride() for v in views] == shapes
    with torch.no_grad():
        parameter.fill_(7)
    assert buffer[:4].eq(7).all() and views[0][:2].eq(7).all()


def test_what_is_not_kept_is_zero() -> None:
    gradient = torch.ones(5)
    stored = StorageSet(storages([gradient], CPU).values(), kept=False)
    assert not stored.host_nbytes
    stored.free(host_buffer(0, CPU))
    stored.restore()
    assert gradient.equal(torch.zeros(5))


def test_the_storages_of_a_wrapper_are_those_that_it_is_made_of() -> None:
    inner = torch.ones(3, dtype=torch.uint8)
    outer = torch.nn.Parameter(torch.zeros(7))
    outer._data = inner  # type: ignore[attr-defined]
    assert list(storages([outer], CPU)) == [inner.untyped_storage()._cdata]


def test_tensors_of_another_device_stay() -> None:
    assert not storages([torch.empty(3, device="meta")], CPU)


def test_memory_of_an_array_is_refused_before_anything_is_freed() -> None:
    first, second = torch.ones(3), torch.ones(3)
    array = second.numpy()
    with refuses(RuntimeError, "tensor.numpy"):
        stored = StorageSet(storages([first, second], CPU).values(), kept=True)
        stored.free(host_buffer(stored.host_nbytes, CPU))
    assert first.untyped_storage().nbytes() == 12 and array.sum() == 3
