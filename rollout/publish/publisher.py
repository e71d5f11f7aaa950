"""Publish weights: a stream of whole tensors, encoded, in buckets of bounded size.

Every trainer rank has a publisher, because draining the stream is collective; one rank sends. A `Transport` decides how
a bucket reaches the servers, the rest is the same for all: begin, one request for each bucket, end, flush, compare. A
bucket is encoded while the servers load the one before. Up to `hold_bytes`, and no more buckets than the transport
packs at a time, are encoded before the servers are paused: for a small model the pause lasts only as long as the
transfer, and a large one is never held completely in the sender's memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

from miles_like.types import NamedTensor, PublishReport
from quant.stream import quantize_stream
from rollout.publish.buckets import cut, gathered
from rollout.publish.group import GroupTransport
from rollout.publish.publication import PublishTarget, RankChecksums, Sent, publish_stream
from rollout.publish.servers import ServerSet, servers_of
from rollout.publish.transports import CudaHandles, Inline, MemoryHandles, Send, Transport
from rollout.sglang.client import RolloutError
from rollout.wire import endpoints
from rollout.wire.checksum import tensor_checksum
from rollout.wire.control import BeginUpdate, EndUpdate, PauseMode, PauseRequest


class _Bucket(NamedTuple):
    send: Send
    nbytes: int  # of the tensors
    checksums: Future[dict[str, str]]  # empty if the servers report other hashes


def transport_of(target: PublishTarget) -> Transport:
    """How buckets reach the servers of `target`, by `publish.path` and the memory of which servers open handles."""
    if target.config.path == "distributed":
        return GroupTransport(target)
    if target.handles is None:
        return Inline(target)
    return CudaHandles(target) if target.handles == "cuda" else MemoryHandles(target)


class TensorPublisher:
    """WeightPublisher of buckets, by requests, handles or a process group (`transport_of`).

    send: whether this rank sends. hold_bytes: encoded before the servers are paused. After a failure the servers stay
    paused, so that no sample comes from partly updated weights; the RuntimeError names the server and asks for a
    restart.
    """

    every_rank = False

    def __init__(self, target: PublishTarget, *, send: bool, hold_bytes: int = 2 << 30) -> None:
        self._target, self._is_sender, self._hold_bytes = target, send, hold_bytes
        self._mode = PauseMode(target.config.pause_mode)
        self._transport = transport_of(target) if send else Inline(target)
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="buckets")

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError (weights that cannot be encoded) or RuntimeError."""
        send = partial(self._send, version=version) if self._is_sender else None
        return publish_stream(weights, version=version, send=send)

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        servers = servers_of(self._target)
        try:
            with self._transport.ready(servers):
                return self._publish(servers, self._encoded(stream), version)
        except RolloutError as e:  # before the pause
            raise RuntimeError(
                f"weights of version {version} were not published: {e}. The servers still serve the version before"
            ) from e
        finally:
            servers.close()

    def _publish(self, servers: ServerSet, buckets: Iterator[_Bucket], version: int) -> Sent:
        held, size, most = list[_Bucket](), 0, self._transport.limit
        while size < self._hold_bytes and len(held) != most and (bucket := next(buckets, None)) is not None:
            held.append(bucket)
            size += bucket.nbytes
        if not held:
            raise ValueError("no weights to publish: the stream is empty")
        began = time.perf_counter()
        try:
            servers.ask(endpoints.PAUSE, PauseRequest(mode=self._mode).to_json())
            nbytes, checksums = self._update(servers, itertools.chain(_emptying(held), buckets), version)
            servers.ask(endpoints.CONTINUE, {})
        except (RolloutError, ValueError, OSError) as e:  # of a server; of a later tensor; no room for a later bucket
            raise RuntimeError(
                f"weights of version {version} were not published: {e}. The servers stay paused because they may hold "
                "parts of two versions: restart them, or restart the run with --resume"
            ) from e
        return Sent(nbytes, time.perf_counter() - began, checksums)

    def _update(self, servers: ServerSet, buckets: Iterator[_Bucket], version: int) -> tuple[int, RankChecksums]:
        embedded = self._target.kind == "embedded"
        named = str(version) if embedded else None
        total, sent = 0, dict[str, str]()
        servers.change(endpoints.BEGIN_UPDATE, BeginUpdate(weight_version=named).to_json())
        for nbytes, checksums in self._loaded(servers, buckets, version):
            total += nbytes
            sent |= checksums
        servers.change(endpoints.END_UPDATE, EndUpdate(weight_version=named).to_json())
        flush_cache(servers, self._mode)
        if not self._target.config.verify:
            return total, ()
        return total, compare_checksums(servers, sent if embedded else None)

    def _loaded(
        self, servers: ServerSet, buckets: Iterator[_Bucket], version: int
    ) -> Iterator[tuple[int, dict[str, str]]]:
        """Send the buckets; yields (bytes, checksums) of each once the servers have loaded it."""
        sending: Future[None] | None = None
        before: _Bucket | None = None
        try:
            for bucket, last in _with_last(buckets):  # packs a bucket while `sending`
                if sending is not None and before is not None:
                    sending.result()
                    yield before.nbytes, before.checksums.result()
                before, sending = bucket, self._sending.submit(bucket.send, servers, str(version) if last else None)
            if sending is not None and before is not None:
                sending.result()
                yield before.nbytes, before.checksums.result()
        finally:
            if sending is not None:
                wait([sending])  # after an error too: the next publication must find no request under way

    def _encoded(self, stream: Iterator[NamedTensor]) -> Iterator[_Bucket]:
        hashed = self._target.config.verify and self._target.kind == "embedded"
        encoded = quantize_stream(gathered(stream, self._target.fused), self._target.spec)
        for part in cut(encoded, self._target.config.bucket_bytes, self._target.fused):
            send = self._transport.pack(part)
            # hash in a thread while sending: hashing is slow and releases the GIL
            checksums = self._hashing.submit(_checksums, part if hashed else [])
            yield _Bucket(send, sum(t.tensor.nbytes for t in part), checksums)


def _checksums(tensors: Sequence[NamedTensor]) -> dict[str, str]:
    return {t.name: tensor_checksum(t.name, t.tensor) for t in tensors}


def flush_cache(servers: ServerSet, mode: PauseMode) -> None:
    """Drop keys and values of the old weights, unless the pause is IN_PLACE: then running requests keep theirs."""
    if mode is not PauseMode.IN_PLACE:
        servers.ask(endpoints.FLUSH_CACHE, {})


def compare_checksums(servers: ServerSet, sent: dict[str, str] | None) -> RankChecksums:
    """Check that all servers report equal checksums, and that these equal `sent` if given. Raises RolloutError.
    Returns the checksums.

    `sent` may contain more tensors: an engine without speculative decoding skips the multi-token-prediction layers.
    """
    replies = servers.checksums()
    first = replies[0]
    for url, reply in zip(servers.urls[1:], replies[1:], strict=True):
        if reply.per_engine_checksum != first.per_engine_checksum:
            which = _differing(first.tensors, reply.tensors)
            raise RolloutError(f"servers {servers.urls[0]} and {url} hold different weights ({which})")
    held = first.ranks[0].checksums
    if sent is not None and any(sent.get(n) != c for n, c in held.items()):
        which = _differing({n: sent.get(n) for n in held}, held)
        raise RolloutError(f"server {servers.urls[0]} holds weights that differ from those sent ({which})")
    return first.per_rank


def _differing(a: Mapping[str, str | None], b: Mapping[str, str]) -> str:
    names = sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))
    return f"{len(names)} tensors: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def _emptying(items: list[_Bucket]) -> Iterator[_Bucket]:
    """The items in order, without keeping a reference to those already yielded."""
    items.reverse()
    while items:
        yield items.pop()


def _with_last(items: Iterator[_Bucket]) -> Iterator[tuple[_Bucket, bool]]:
    """Pairs (item, whether it is the last)."""
    item = next(items, None)
    while item is not None:
        after = next(items, None)
        yield item, after is None
        item = after
