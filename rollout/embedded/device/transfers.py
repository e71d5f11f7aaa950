"""Copies between host memory and the device of an engine.

A step of the engine runs on the current stream, which it never waits for but in `Transfers.fetch`: the sampled tokens
come to the host in one copy. What a step needs from the host, slots and positions and random numbers, goes the other
way in `Transfers.send`, packed into one pinned buffer, without a wait: PyTorch's allocator reuses the buffer's memory
only after the copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

_ALIGNED = 16  # bytes at whose multiples a packed tensor begins


class Transfers:
    """The two copies of an engine on `device`. Between host and host nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_host = device.type == "cpu"

    def send(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Host tensors -> the same on the device. Does not wait for the device."""
        if self.on_host or not tensors:
            return tensors
        starts = _starts(tensors)
        pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        for t, place in zip(tensors, _views(pinned, tensors, starts), strict=True):
            place.copy_(t)
        return tuple(_views(pinned.to(self.device, non_blocking=True), tensors, starts))

    def fetch(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors on the device -> the same in host memory. The only place where a step waits for the device."""
        if self.on_host or not tensors:
            return tensors
        starts = _starts(tensors)
        packed = torch.empty(starts[-1], dtype=torch.uint8, device=self.device)
        for t, place in zip(tensors, _views(packed, tensors, starts), strict=True):
            place.copy_(t)
        pinned = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
        pinned.copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        return tuple(_views(pinned, tensors, starts))


HOST = Transfers(torch.device("cpu"))


def _starts(tensors: Sequence[Tensor]) -> list[int]:
    """The first byte of each tensor in a buffer, and the size of the buffer."""
    sizes = (-(-t.numel() * t.element_size() // _ALIGNED) * _ALIGNED for t in tensors)
    return list(itertools.accumulate(sizes, initial=0))


def _views(flat: Tensor, like: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Parts of uint8 `flat` with the dtypes and shapes of `like`."""
    return [
        flat[at : at + t.numel() * t.element_size()].view(t.dtype).view(t.shape)
        for t, at in zip(like, starts, strict=False)
    ]
