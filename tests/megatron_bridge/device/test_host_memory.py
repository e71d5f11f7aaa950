"""Host memory for what leaves a device: as many bytes as asked for, given back with the last tensor; with a GPU pinned
once, and unpinned before the pages go.

Not covered: CUDA itself; its two functions are recorded stand-ins.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_bridge.device.host_memory import ALIGNMENT, buffer_bytes, host_buffer, host_like, parts
from tests.support.refusals import refuses

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 1 << 20


def mapped(address: int) -> bool:
    """Whether the address is in memory of this process, by the operating system."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return any(a <= address < b for a, b in ([int(x, 16) for x in line.split()[0].split("-")] for line in lines))


class Runtime:
    """In place of CUDA's: which memory it has pinned, and whether it was there when it was unpinned."""

    def __init__(self, error: int = 0) -> None:
        self.error, self.pinned, self.calls = error, dict[int, int](), list[tuple[int, ...]]()
        self.there: list[bool] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append((address, nbytes, flags))
        if not self.error:
            self.pinned[address] = nbytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.there.append(mapped(address))
        del self.pinned[address]
        return 0


@given(st.lists(st.integers(0, 3000), max_size=8))
def test_parts_are_disjoint_aligned_and_waste_less_than_one_alignment_each(sizes: list[int]) -> None:
    total = buffer_bytes(sizes)
    assert sum(sizes) <= total <= sum(sizes) + len(sizes) * (ALIGNMENT - 1)
    buffer = host_buffer(total, CPU)
    assert buffer.nbytes == total
    found = parts(buffer, sizes)
    for i, part in enumerate(found):
        part.fill_(i + 1)
        assert not part.nbytes or part.data_ptr() % ALIGNMENT == 0
    assert [part.nbytes for part in found] == sizes
    assert all(part.eq(i + 1).all() for i, part in enumerate(found))


def test_tensors_like_others_share_one_buffer() -> None:
    like = [torch.ones(3, 5, dtype=torch.bfloat16), torch.tensor(2.0), torch.zeros(0, 4), torch.arange(7).bool()]
    made = host_like(like, CPU)
    assert [(x.shape, x.dtype) for x in made] == [(x.shape, x.dtype) for x in like]
    assert len({x.untyped_storage().data_ptr() for x in made}) == 1
    for x, y in zip(made, like, strict=True):
        assert x.copy_(y).equal(y)
    assert all(x.equal(y) for x, y in zip(made, like, strict=True))


def test_the_pages_are_the_system_s_again_when_the_last_tensor_is_gone() -> None:
    buffer = host_buffer(64 * MIB, CPU)
    address, view = buffer.data_ptr() + 32 * MIB, buffer[:10]
    del buffer
    gc.collect()
    assert mapped(address)
    del view
    gc.collect()
    assert not mapped(address)


def test_on_a_gpu_exactly_the_bytes_are_pinned_and_unpinned_while_they_are_mapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five MiB and a byte: torch's own allocator would pin eight."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    (part, _) = parts(host_buffer(buffer_bytes([5 * MIB, 1]), CUDA), [5 * MIB, 1])
    assert list(runtime.pinned.values()) == [5 * MIB + ALIGNMENT] and not runtime.there
    assert runtime.calls == [(part.data_ptr(), 5 * MIB + ALIGNMENT, 1)]
    del part, _
    gc.collect()
    assert not runtime.pinned and runtime.there == [True]
    assert host_buffer(0, CUDA).nbytes == 0 and len(runtime.calls) == 1


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime(error=2)  # cudaErrorMemoryAllocation
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with refuses(RuntimeError, MIB, 2, "memory"):
        host_buffer(MIB, CUDA)
    gc.collect()
    assert not runtime.there
