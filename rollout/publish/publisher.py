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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from miles_like.types import NamedTensor, PublishReport, ServerFault
from quant.stream import quantize_stream
from rollout.publish.buckets import HostBytes, cut, gathered
from rollout.publish.group import GroupTransport
from rollout.publish.publication import PublishTarget, RankChecksums, Sent, publish_stream
from rollout.publish.sent_tensors import SentTensors
from rollout.publish.servers import OLD_SERVED, ServerSet, Stage, check_versions, serve_again, servers_of, states_of
from rollout.publish.transports import CudaHandles, Inline, MemoryHandles, Send, Transport
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from rollout.wire.checksum import tensor_checksum
from rollout.wire.control import BeginUpdate, ChecksumReply, EndUpdate, PauseMode, PauseRequest, UpdateVersion


class Bucket(NamedTuple):
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

    send: whether this rank sends. After a failure before the weights
    of a server have changed all serve the version before; else they stay paused, so that no sample comes from partly
    updated weights. The RuntimeError names the server and says which.
    """

    every_rank = False

    def __init__(self, target: PublishTarget, *, send: bool) -> None:
        self._target, self._is_sender, self._hold_bytes = target, send, target.config.hold_bytes
        self._mode = PauseMode(target.config.pause_mode)
        self._transport = transport_of(target) if send else Inline(target)
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="checksums")
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="buckets")
        self._stage = Stage.ASKED
        self.host = HostBytes(self._hold_bytes, target.config.bucket_bytes)  # of one publication
        self._sent = SentTensors()
        self._states: list[tuple[str, str, bool]] = []  # of the servers, when they acknowledged `_sent`

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError (weights that cannot be encoded) or RuntimeError."""
        send = partial(self._send, version=version) if self._is_sender else None
        return publish_stream(weights, version=version, send=send)

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        servers = servers_of(self._target)
        self._stage = Stage.ASKED
        try:
            check_versions(servers, version, kind=self._target.kind)
            self.host = HostBytes(self._hold_bytes, self._target.config.bucket_bytes)
            states, self._states = self._states, []
            if not states or states_of(self._target) != states:
                self._sent.forget()
            with self._ready(servers):
                sent = self._publish(servers, self._encoded(stream), version)
            if self._target.kind == "embedded" and not sent.failed:
                self._states = states_of(self._target, version)
            return sent
        except (RuntimeError, ValueError, OSError) as error:  # of a server, trainer's ranks, a tensor, no room
            e = self._cause(error, servers)
            if self._stage is Stage.ASKED and not isinstance(e, RolloutError):
                raise
            if isinstance(e, RolloutError) and self._target.goes_on and servers.some_failed:
                # of a group of all servers: those that are left have lost the publication with the one that failed
                rest = tuple(ServerFault(url, f"server {url}: {e}", answers=True) for url in servers.urls)
                return Sent(0, failed=servers.lost + rest)
            self._target.check_epoch()  # a stale process says so, and leaves the servers to the later start
            now = self._give_up(servers, version)
            raise RuntimeError(f"weights of version {version} were not published: {e}. {now}") from e
        finally:
            servers.close()

    def _publish(self, servers: ServerSet, buckets: Iterator[Bucket], version: int) -> Sent:
        held = self._ahead(buckets)
        if not held and not self._sent.seen:
            raise ValueError("there are no weights to publish: the stream is empty")
        began, self._stage = time.perf_counter(), Stage.PAUSED
        servers.ask(endpoints.PAUSE, PauseRequest(mode=self._mode).to_json())
        nbytes, checksums = self._update(servers, itertools.chain(emptying(held), buckets), version)
        servers.resume()
        return Sent(nbytes, time.perf_counter() - began, checksums, servers.lost, decoding=servers.decoding)

    def _ready(self, servers: ServerSet) -> AbstractContextManager[None]:
        """Around a publication to these servers, before anything is encoded."""
        return self._transport.ready(servers)

    def _cause(self, error: Exception, servers: ServerSet) -> Exception:
        """What a failed publication is reported with."""
        return error

    def _ahead(self, buckets: Iterator[Bucket]) -> list[Bucket]:
        """The first buckets, encoded before the servers are paused."""
        held, size, most = list[Bucket](), 0, self._transport.limit
        while size < self._hold_bytes and len(held) != most and (bucket := next(buckets, None)) is not None:
            held.append(bucket)
            size += bucket.nbytes
        return held

    def _give_up(self, servers: ServerSet, version: int) -> str:
        """Returns what the servers do now. An embedded server that refuses the end of an update has changed nothing."""
        match self._stage:
            case Stage.PAUSED:
                serve_again(self._target.urls, self._target, None)
            case Stage.BEGUN:
                serve_again(self._target.urls, self._target, version)
            case Stage.ENDING if not servers.urls:
                serve_again([fault.url for fault in servers.lost if fault.answers], self._target, None)
            case Stage.ENDING | Stage.CHANGED:
                return (
                    "The servers remain paused because they may have parts of two versions: restart them, or "
                    "restart the run with --resume"
                )
        return OLD_SERVED

    def _update(self, servers: ServerSet, buckets: Iterator[Bucket], version: int) -> tuple[int, RankChecksums]:
        embedded = self._target.kind == "embedded"
        named = str(version) if embedded else None
        total, sent = 0, dict[str, str]()
        self._stage = Stage.BEGUN
        servers.change(endpoints.BEGIN_UPDATE, BeginUpdate(weight_version=named).to_json())
        self._stage = Stage.BEGUN if embedded else Stage.CHANGED
        for nbytes, hashes in self._loaded(servers, buckets, version):
            total += nbytes
            sent |= hashes
        self._stage = Stage.ENDING if embedded else Stage.CHANGED
        servers.change(endpoints.END_UPDATE, EndUpdate(weight_version=named).to_json())
        self._stage = Stage.CHANGED
        if not total:  # no tensor has changed, and so none carried the version
            body = UpdateVersion(new_version=str(version), abort_all_requests=False)
            servers.change(endpoints.UPDATE_VERSION, body.to_json())
        flush_cache(servers, self._mode)
        checksums = self._compared(servers, sent) if self._target.config.verify else ()
        self._sent.acknowledge(sent)
        return total, checksums

    def _compared(self, servers: ServerSet, sent: dict[str, str]) -> RankChecksums:
        """What the servers hold, compared. sent: checksums of the tensors of this publication."""
        return compare_checksums(servers, self._sent.checksums(sent) if self._target.kind == "embedded" else None)

    def _loaded(
        self, servers: ServerSet, buckets: Iterator[Bucket], version: int
    ) -> Iterator[tuple[int, dict[str, str]]]:
        """Send the buckets; yields (bytes, checksums) of each once the servers have loaded it."""
        sending: Future[None] | None = None
        before: Bucket | None = None
        try:
            for bucket, last in _with_last(buckets):  # packs a bucket while `sending`
                if sending is not None and before is not None:
                    yield self._done(sending, before)
                before, sending = bucket, self._sending.submit(self._sends, bucket.send, servers, version, last)
            if sending is not None and before is not None:
                yield self._done(sending, before)
        finally:
            if sending is not None:
                wait([sending])  # after an error too: the next publication must find no request under way

    def _done(self, sending: Future[None], bucket: Bucket) -> tuple[int, dict[str, str]]:
        sending.result()
        self.host.give(bucket.nbytes)
        return bucket.nbytes, bucket.checksums.result()

    def _sends(self, send: Send, servers: ServerSet, version: int, last: bool) -> None:
        """Send a bucket; in the thread that sends."""
        send(servers, str(version) if last else None)

    def _encoded(self, stream: Iterator[NamedTensor]) -> Iterator[Bucket]:
        embedded = self._target.kind == "embedded"
        hashed = self._target.config.verify and embedded
        encoded = self._stored(stream)
        if embedded:
            encoded = self._sent.changed(encoded)
        for part in cut(encoded, self._target.config.bucket_bytes, self._target.fused):
            nbytes = sum(t.tensor.nbytes for t in part)
            self.host.take(nbytes)
            send = self._transport.pack(part)
            # hash in a thread while sending: hashing is slow and releases the GIL
            checksums = self._hashing.submit(_checksums, part if hashed else [])
            del part
            yield Bucket(send, nbytes, checksums)

    def _stored(self, stream: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        """The stored tensors of the weights."""
        named = quantize_stream(gathered(stream, self._target.fused), self._target.spec)
        return (NamedTensor(name, tensor) for name, tensor in named)


def _checksums(tensors: Sequence[NamedTensor]) -> dict[str, str]:
    return {t.name: tensor_checksum(t.name, t.tensor) for t in tensors}


def flush_cache(servers: ServerSet, mode: PauseMode) -> None:
    """Drop keys and values of the old weights, unless the pause is IN_PLACE: then running requests keep theirs."""
    if mode is not PauseMode.IN_PLACE:
        servers.ask(endpoints.FLUSH_CACHE, {})


def compare_checksums(servers: ServerSet, sent: dict[str, str] | None) -> RankChecksums:
    """Check that all servers report equal checksums, and that these equal `sent` if given. Returns the checksums, none
    where no server is left.

    `sent` may contain more tensors: an engine without speculative decoding skips the multi-token-prediction layers.
    Raises RolloutError, also with `goes_on` where servers differ and no majority says which of them are wrong.
    """
    return compare_replies(servers, servers.checksums(), sent)


def compare_replies(
    servers: ServerSet, answers: Sequence[ChecksumReply], sent: Mapping[str, str] | None
) -> RankChecksums:
    """`compare_checksums` of checksums that `servers` have reported."""
    replies = dict(zip(servers.urls, answers, strict=True))
    if sent is not None:
        servers.lose({url: e for url, reply in replies.items() if (e := _unlike(url, reply, sent)) is not None})
        replies = {url: replies[url] for url in servers.urls}
    if not replies:
        return ()
    (usual, count), *others = Counter(reply.per_engine_checksum for reply in replies.values()).most_common()
    first = next(url for url, reply in replies.items() if reply.per_engine_checksum == usual)
    if others:
        apart = {
            url: RolloutError(
                f"servers {first} and {url} have different weights "
                f"({_differing(replies[first].tensors, reply.tensors)})"
            )
            for url, reply in replies.items()
            if reply.per_engine_checksum != usual
        }
        if 2 * count <= len(replies):
            raise next(iter(apart.values()))
        servers.lose(apart)
    return replies[first].per_rank


def _unlike(url: str, reply: ChecksumReply, sent: Mapping[str, str]) -> RolloutError | None:
    held = reply.ranks[0].checksums
    if all(sent.get(n) == c for n, c in held.items()):
        return None
    which = _differing({n: sent.get(n) for n in held}, held)
    return RolloutError(f"server {url} has weights that differ from those sent ({which})")


def _differing(a: Mapping[str, str | None], b: Mapping[str, str]) -> str:
    names = sorted(n for n in a.keys() | b.keys() if a.get(n) != b.get(n))
    return f"{len(names)} tensors: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"


def emptying(items: list[Bucket]) -> Iterator[Bucket]:
    """The items in order, without keeping a reference to those already yielded."""
    items.reverse()
    while items:
        yield items.pop()


def _with_last(items: Iterator[Bucket]) -> Iterator[tuple[Bucket, bool]]:
    """Pairs (item, whether it is the last)."""
    item = next(items, None)
    while item is not None:
        after = next(items, None)
        yield item, after is None
        item = after
