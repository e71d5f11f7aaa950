"""How encoded buckets reach the servers: within requests, or by handles of memory that servers on this host open."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Protocol

import torch
from torch.multiprocessing.reductions import reduce_tensor

from miles_like.types import NamedTensor
from rollout.publish.buffers import BUCKETS, Buffer, Pool, Segment, put
from rollout.publish.publication import PublishTarget
from rollout.publish.servers import ServerSet
from rollout.wire import endpoints
from rollout.wire.control import SAFETENSORS, UpdateFromTensor, encode_safetensors, encode_sglang_pickle
from rollout.wire.flat import (
    FLATTENED,
    SEGMENT,
    aligned_layout,
    encode_cuda_handle,
    encode_memory_handle,
    encode_segment,
    flat_bytes,
)
from rollout.wire.replies import Json

# Sends a packed bucket to the servers, with the version if it is the last one. It returns when all servers have loaded
# it, and raises RolloutError when one has not. Called once, in the order of packing, by one thread at a time.
Send = Callable[[ServerSet, str | None], None]


class Transport(Protocol):
    """One of the sending rank's publisher."""

    @property
    def limit(self) -> int | None:
        """Of buckets that are packed and not yet loaded by the servers; None: no limit."""

    def ready(self, servers: ServerSet) -> AbstractContextManager[None]:
        """Around a publication. Entered before the servers are paused; raises RolloutError."""

    def pack(self, part: Sequence[NamedTensor]) -> Send:
        """Copies a bucket to where it is sent from. Raises OSError where there is no room for it."""


def update(payload: Sequence[str], load_format: str | None, version: str | None) -> Json:
    """The body of a request with a bucket. The cache is flushed once, after the last: a failed flush would fail the
    update."""
    return UpdateFromTensor(
        serialized_named_tensors=list(payload), load_format=load_format, flush_cache=False, weight_version=version
    ).to_json()


class Inline:
    """The tensors travel within requests: to servers on any host, once for each rank of a stock server."""

    limit = None

    def __init__(self, target: PublishTarget) -> None:
        self._embedded, self._tp_size = target.kind == "embedded", target.tp_size

    def ready(self, servers: ServerSet) -> AbstractContextManager[None]:
        return nullcontext()

    def pack(self, part: Sequence[NamedTensor]) -> Send:
        payload = (encode_safetensors(part),) if self._embedded else encode_sglang_pickle(part, self._tp_size)
        return partial(self._send, payload)

    def _send(self, payload: Sequence[str], servers: ServerSet, version: str | None) -> None:
        load_format = SAFETENSORS if self._embedded else None
        servers.change(endpoints.UPDATE_FROM_TENSOR, update(payload, load_format, version))


class MemoryHandles:
    """Requests have the name of a segment of shared memory, which every rank of every server opens.

    Segments are kept for the next publication, because their pages take longer to make than to fill, and closed after
    one that fails and with this object.
    """

    limit = BUCKETS

    def __init__(self, target: PublishTarget) -> None:
        self._embedded, self._tp_size = target.kind == "embedded", target.tp_size
        self._pool = Pool(Segment)
        weakref.finalize(self, self._pool.close)

    @contextmanager
    def ready(self, servers: ServerSet) -> Iterator[None]:
        self._pool.drop_removed()
        try:
            yield
        except BaseException:
            self._pool.close()
            raise

    def pack(self, part: Sequence[NamedTensor]) -> Send:
        return partial(self._send, self._pool.holding(part))

    def _send(self, segment: Segment, servers: ServerSet, version: str | None) -> None:
        if self._embedded:
            body = update([encode_segment(segment.name, segment.layout)], SEGMENT, version)
        else:
            body = update([encode_memory_handle(segment.name, segment.layout)] * self._tp_size, FLATTENED, version)
        servers.change(endpoints.UPDATE_FROM_TENSOR, body)
        self._pool.give_back(segment)


class CudaHandles:
    """Requests have CUDA IPC handles of memory on this rank's GPU, one for each rank of each stock server, since a
    handle can be opened once."""

    limit = BUCKETS

    def __init__(self, target: PublishTarget) -> None:
        self._tp_size = target.tp_size

    def ready(self, servers: ServerSet) -> AbstractContextManager[None]:
        return nullcontext()

    def pack(self, part: Sequence[NamedTensor]) -> Send:
        layout = aligned_layout(part)
        buffer = put(Buffer(flat_bytes(layout), "cuda"), layout, part)
        torch.cuda.current_stream().synchronize()  # readers, and the thread that sends, use other streams
        return partial(self._send, buffer)

    def _send(self, buffer: Buffer, servers: ServerSet, version: str | None) -> None:
        bodies = [
            update([self._handle(buffer) for _ in range(self._tp_size)], FLATTENED, version) for _ in servers.urls
        ]
        servers.change_each(endpoints.UPDATE_FROM_TENSOR, bodies)
        # Not used again: a rank may still copy from it when another has answered. torch keeps the memory until every
        # reader has released it.
        buffer.close()
        torch.cuda.ipc_collect()

    @staticmethod
    def _handle(buffer: Buffer) -> str:
        _, arguments = reduce_tensor(buffer.tensor)
        uuid = str(torch.cuda.get_device_properties(buffer.tensor.device).uuid)
        return encode_cuda_handle((*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :]), buffer.layout)


_DEVICE = 6  # place of the device's number among the arguments of torch's `rebuild_cuda_tensor`
