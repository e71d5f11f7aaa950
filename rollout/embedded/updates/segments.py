"""Buckets of weights that a publisher on this host has put into shared memory."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

import torch
from torch import Tensor

from miles_like.types import NamedTensor
from rollout.wire.flat import HEADER, Layout, decode_segment, flat_bytes

DIRECTORY = Path("/dev/shm")
_PIECE = 1 << 30  # bytes of one read: Linux reads less than 2 GiB at once


def read_segment(text: str, most: int) -> list[NamedTensor]:
    """The tensors of the segment that `text` describes (`encode_segment`), each in its own memory. most: bytes that are
    read of one segment.

    The segment is read and not mapped: a mapping whose file is truncated by another process would end this one. Raises
    ValueError for a description that is not valid, a segment that is not there, is not this user's or does not hold
    what is described, and for more than `most` bytes.
    """
    name, layout = decode_segment(text)
    if (nbytes := flat_bytes(layout)) > most:
        raise ValueError(
            f"the tensors of segment {name} have {nbytes:,} bytes, but this server accepts {most:,} at once: send "
            "less, or start it with a larger --bucket-bytes"
        )
    try:
        fd = os.open(DIRECTORY / name[1:], os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as e:
        raise ValueError(
            f"segment {name} cannot be opened ({e.strerror}): a publisher and its server must see the same {DIRECTORY}"
        ) from None
    try:
        return list(_read(fd, name, layout))
    finally:
        os.close(fd)


def _read(fd: int, name: str, layout: Layout) -> list[NamedTensor]:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ValueError(f"segment {name} is not shared memory owned by this server's user")
    held = found.st_size - HEADER
    for t in layout:
        if t.start + t.nbytes > held:
            raise ValueError(
                f"segment {name} has {held:,} bytes, but {t.name[:200]} takes bytes {t.start:,} to "
                f"{t.start + t.nbytes:,}"
            )
    out = []
    for t in layout:
        tensor = torch.empty(t.shape, dtype=t.dtype)
        _fill(fd, name, tensor, HEADER + t.start)
        out.append(NamedTensor(t.name, tensor))
    return out


def _fill(fd: int, name: str, tensor: Tensor, at: int) -> None:
    done = 0
    while done < tensor.nbytes:
        size = min(_PIECE, tensor.nbytes - done)
        # not through numpy: memory that an array has seen cannot be resized
        piece = (ctypes.c_char * size).from_address(tensor.data_ptr() + done)
        if (got := os.preadv(fd, [piece], at + done)) == 0:
            raise ValueError(
                f"segment {name} was truncated while it was read: the publisher must keep it until the server has "
                "replied"
            )
        done += got
