"""Host memory for copies of what a device holds: as large as the copies, and pinned where the device is a GPU.

`torch.empty(..., pin_memory=True)` is not used. Torch's allocator of pinned memory (torch 2.13, `allocate` in
ATen/core/CachingHostAllocator.h) rounds each request up to a power of two and keeps freed memory until the process
ends: masters of 5 GiB take 8 GiB of the host. Its limits pinned_max_round_threshold_mb and pinned_max_cached_size_mb
(PYTORCH_ALLOC_CONF) hold for all pinned memory of a process, so that they are left to the user.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

ALIGNMENT = 512  # bytes, of each part of a buffer; also that of torch's blocks on a GPU
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context of the process


class _Pages(mmap.mmap):
    """Private anonymous pages, returned to the system with the last tensor that uses them."""

    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:  # before the pages are unmapped, unlike a callback of a weak reference
        if self.unpin is not None:
            self.unpin()


def host_buffer(nbytes: int, device: torch.device) -> Tensor:
    """[nbytes] uint8 on the host, zeros; pinned if `device` is a GPU. Raises RuntimeError where CUDA cannot pin it."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    pages = _Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    out = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        _pin(pages, out.data_ptr(), nbytes)
    return out


def buffer_bytes(sizes: Iterable[int]) -> int:
    """Bytes of a buffer for `parts` of these sizes."""
    return sum(_aligned(size) for size in sizes)


def parts(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Consecutive parts [size] of a buffer of `buffer_bytes(sizes)`, which share its memory."""
    assert buffer.nbytes == buffer_bytes(sizes), (buffer.nbytes, sizes)
    out, start = [], 0
    for size in sizes:
        out.append(buffer[start : start + size])
        start += _aligned(size)
    return out


def host_like(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """For each tensor one of its shape and dtype, zeros, all in one `host_buffer`."""
    sizes = [x.nbytes for x in tensors]
    raws = parts(host_buffer(buffer_bytes(sizes), device), sizes)
    return [raw.view(x.dtype).view(x.shape) for raw, x in zip(raws, tensors, strict=True)]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _pin(pages: _Pages, address: int, nbytes: int) -> None:
    runtime = torch.cuda.cudart()
    if error := int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)):
        raise RuntimeError(
            f"{nbytes} bytes of host memory could not be pinned (CUDA error {error}), which a rank needs for "
            "weights and optimizer state that are moved off its GPU: give the node's container more memory, or "
            "start fewer ranks on it"
        )
    pages.unpin = lambda: runtime.cudaHostUnregister(address)
