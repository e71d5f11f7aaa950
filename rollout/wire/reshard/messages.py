"""The bytes of messages: those of rectangles of tensors, one after the other. No I/O."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
import xxhash
from torch import Tensor

from rollout.wire.reshard.requests import Segment


def byte_rows(t: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [rows, bytes of a row], sharing its memory."""
    rows = len(t) if t.dim() else 1
    return t.view(rows, -1).view(torch.uint8) if t.numel() else t.new_empty(rows, 0, dtype=torch.uint8)


def packed(segments: Sequence[Segment], part: Callable[[Segment], Tensor]) -> Tensor:
    """A message: the bytes of the segments, uint8, on the CPU. part: the bytes of one, [rows, width]."""
    out = torch.empty(sum(s.nbytes for s in segments), dtype=torch.uint8)
    done = 0
    for s in segments:
        out[done : done + s.nbytes].view(s.rows, s.width).copy_(part(s))
        done += s.nbytes
    return out


def unpack(message: Tensor, segments: Sequence[Segment], part: Callable[[Segment], Tensor]) -> None:
    """The inverse of `packed`. part: where the bytes of one belong, [rows, width]."""
    done = 0
    for s in segments:
        part(s).copy_(message[done : done + s.nbytes].view(s.rows, s.width))
        done += s.nbytes


class MessageHash:
    """XXH3 of the bytes of several messages, in their order."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def add(self, message: Tensor) -> None:
        """message: uint8, contiguous, on the CPU."""
        if message.nbytes:
            self._hash.update((ctypes.c_char * message.nbytes).from_address(message.data_ptr()))

    @property
    def hex(self) -> str:
        return self._hash.hexdigest()
