"""Flat buffers of a publication: a bounded number, each used again once servers have loaded its bucket."""

from __future__ import annotations

import functools
import mmap
import os
import secrets
import struct
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.resource_tracker import ResourceTracker
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from miles_like.types import NamedTensor
from quant.kernels.choice import uses_triton
from quant.kernels.tally import Tally
from rollout.wire.flat import HEADER, Layout, aligned_layout, fill, flat_bytes

BUCKETS = 3  # packed at the same time: one that servers load, the next, and one that is being packed
DIRECTORY = Path("/dev/shm")
# In the header torch counts the users of a segment (aten/src/ATen/MapAllocator.cpp). A reader adds itself, subtracts
# the one that a torch writer would have added for it, and subtracts itself: at zero it would remove the segment.
_USERS = struct.pack("<i", 1 << 30)


class Buffer:
    """Memory of this process on one device."""

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        self.memory = torch.empty(capacity, dtype=torch.uint8, device=device)
        self.layout: Layout = ()  # of the bucket that it holds

    @property
    def capacity(self) -> int:
        return self.memory.nbytes

    @property
    def is_there(self) -> bool:
        return True

    @property
    def tensor(self) -> Tensor:
        """The bucket, flat."""
        return self.memory[: flat_bytes(self.layout)]

    def close(self) -> None:
        """Free the memory."""
        del self.memory


class Segment:
    """A segment of POSIX shared memory, which servers on this host open by its name.

    A process that ends leaves none, also when it is killed: a resource tracker of Python's, a process beside it that
    is not shared with others, removes those that it has not removed.
    """

    def __init__(self, capacity: int) -> None:
        """capacity: bytes of the largest bucket that it takes. Raises OSError where there is no room for it."""
        self.capacity = capacity
        self.name = f"/miles-like-{secrets.token_hex(16)}"
        self.layout: Layout = ()  # of the bucket that it holds
        self._mapped = self._create(HEADER + capacity)
        self._mapped[: len(_USERS)] = _USERS
        self.memory = torch.frombuffer(self._mapped, dtype=torch.uint8, offset=HEADER)

    def close(self) -> None:
        """Remove the segment. Readers that have opened it keep its memory."""
        del self.memory  # a mapping to which a tensor refers cannot be closed
        self._mapped.close()
        self._remove()

    def _create(self, size: int) -> mmap.mmap:
        _tracker(os.getpid()).register(self.name, "shared_memory")  # before it is there
        fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # its pages: writing to one that the file system cannot hold would end the process
            os.posix_fallocate(fd, 0, size)
            return mmap.mmap(fd, size)
        except OSError as e:
            self._remove()
            raise OSError(
                e.errno,
                f"{DIRECTORY} has no space for a segment of {size:,} bytes ({e.strerror}): enlarge it (--shm-size "
                "or --ipc host of a container), lower publish.bucket_bytes, or set publish.path = 'disk'",
            ) from e
        finally:
            os.close(fd)

    def _remove(self) -> None:
        self._path.unlink(missing_ok=True)
        _tracker(os.getpid()).unregister(self.name, "shared_memory")

    @property
    def is_there(self) -> bool:
        """Whether the segment exists: torch in a reader may have removed it when the reader ended."""
        return self._path.exists()

    @property
    def _path(self) -> Path:
        return DIRECTORY / self.name[1:]


@functools.cache
def _tracker(pid: int) -> ResourceTracker:
    """Of the process `pid`, this one. That of multiprocessing is shared by processes which one has started, and removes
    what they leave when the last of them has ended."""
    return ResourceTracker()


class Holder(Protocol):
    memory: Tensor
    layout: Layout

    @property
    def capacity(self) -> int: ...
    @property
    def is_there(self) -> bool:
        """Whether the buffer can still be opened by readers."""

    def close(self) -> None: ...


H = TypeVar("H", bound=Holder)


PACKED = Tally()  # bytes of the buckets that this process has put into buffers


def put(buffer: H, layout: Layout, tensors: Iterable[NamedTensor]) -> H:
    """Copy a bucket into a buffer; returns the buffer. A Triton kernel copies tensors of the buffer's device."""
    tensors = list(tensors)
    nbytes = flat_bytes(layout)
    if uses_triton(buffer.memory) and all(t.device == buffer.memory.device for _, t in tensors):
        from rollout.publish.kernels.gather import gather

        found = {name: t.detach().contiguous() for name, t in tensors}
        gather(buffer.memory, [found[t.name] for t in layout], [t.start for t in layout])
        PACKED.triton += nbytes
    else:
        fill(buffer.memory, layout, tensors)
        PACKED.torch += nbytes
    buffer.layout = layout
    return buffer


class Pool(Generic[H]):
    """At most BUCKETS buffers. One thread takes them, one gives them back."""

    def __init__(self, make: Callable[[int], H]) -> None:
        """make: a buffer of so many bytes."""
        self._make = make
        self._free: deque[H] = deque()
        self._all: list[H] = []

    def holding(self, tensors: Iterable[NamedTensor]) -> H:
        """A free buffer with these tensors. One that is too small is replaced. Raises what `make` raises."""
        tensors = list(tensors)
        layout = aligned_layout(tensors)
        return put(self._taken(flat_bytes(layout)), layout, tensors)

    def give_back(self, buffer: H) -> None:
        self._free.append(buffer)

    def drop_removed(self) -> None:
        """Close the free buffers that cannot be opened any more."""
        for buffer in [b for b in self._free if not b.is_there]:
            self._free.remove(buffer)
            self._all.remove(buffer)
            buffer.close()

    def close(self) -> None:
        """Close all buffers."""
        self._free.clear()
        while self._all:
            self._all.pop().close()

    def _taken(self, nbytes: int) -> H:
        if self._free:
            buffer = self._free.popleft()
            if buffer.capacity >= nbytes:
                return buffer
            self._all.remove(buffer)
            buffer.close()
        assert len(self._all) < BUCKETS, "a bucket is packed while every buffer holds one that is not loaded"
        buffer = self._make(nbytes)
        self._all.append(buffer)
        return buffer
