"""Publish weights from the trainer ranks that hold them to the server ranks that keep them, without a gather.

Every trainer rank encodes its shards and sends them; rank 0 also asks the servers, and says to the others when. A plan
(`plan.py`) is made for the first publication, and again when the servers change or after a failure. For each piece of
it rank 0 sends a request to every server, all trainer ranks send their messages, and prepare a later piece meanwhile.
The servers hold the pieces back until the end of the update.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from miles_like.rank_protocols import ShardedWeights, WeightShards
from miles_like.types import NamedTensor, PublishReport, WeightRegion
from rollout.publish.group import address_towards, later, listener, once_or_with, tell_to_leave
from rollout.publish.publication import PublishTarget, RankChecksums, Sent, publish_stream
from rollout.publish.publisher import Bucket, TensorPublisher, compare_checksums
from rollout.publish.reshard.member import gathered_by, plan_body, sharded
from rollout.publish.reshard.membership import GroupFailed, Membership
from rollout.publish.reshard.plan import Encoding, Plan, make_plan, other_model
from rollout.publish.reshard.source import Prepared, Source, largest, of_bundles
from rollout.publish.reshard.talk import Talk
from rollout.publish.servers import ServerSet
from rollout.server_key import ServerKey
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from rollout.wire.replies import Json
from rollout.wire.reshard.requests import (
    HashesReply,
    JoinSlices,
    LayoutReply,
    PlannedMessage,
    PlannedTensor,
    PlanSlices,
    SlicesReceived,
    UpdateFromSlices,
)

_CAUSE_S = 2.0  # for trainer ranks to say why they have failed, after a server has
_OF_A_REQUEST = 0.8  # of its time limit, for a message: a server says before the limit which one did not come
_log = logging.getLogger(__name__)


def _nothing() -> None: ...


class ReshardPublisher(TensorPublisher):
    """The publisher of trainer rank 0 of `ranks`, to embedded servers. States after a failure are those of
    TensorPublisher; the group fails as a whole, and the next publication makes another."""

    def __init__(self, target: PublishTarget, *, ranks: int) -> None:
        super().__init__(target, send=False)
        self._ranks, self._encoding = ranks, Encoding(target.spec)
        self._regions: list[list[WeightRegion]] = []  # of each trainer rank
        self._requests = ThreadPoolExecutor(1, thread_name_prefix="announce")
        self._weights: ShardedWeights  # of one publication, as all below
        self._shards: WeightShards
        self._talk: Talk
        self._gathered: Iterator[NamedTensor] = iter(())
        self._version = 0
        self._received: list[list[int]] = []  # bytes, of each rank of each server
        self._hashes: list[Mapping[str, str]] = []  # of each trainer rank: member of the group -> of its messages
        self._plan: Plan
        self._membership: Membership
        self._joint: tuple[str, ...] = ()  # the servers in the group
        self._dissolve: Callable[[], object] = _nothing  # once for each membership
        self._asked = set[str]()  # the servers that it asks to leave

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """With ShardedWeights. Raises as TensorPublisher."""
        self._weights, self._version = sharded(weights), version
        self._shards = self._weights.shards  # collective, before a server is asked
        self._talk = Talk(self._weights.signals, number=self._weights.number, rank=0, ranks=self._ranks)
        return publish_stream((), version=version, send=partial(self._send, version=version))

    def _ahead(self, buckets: Iterator[Bucket]) -> list[Bucket]:
        """One piece: the other ranks too have prepared this and the next one when the first is sent."""
        return list(itertools.islice(buckets, 1))

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        self._gathered = iter(())
        try:
            if not self._regions:
                self._regions = [list(self._shards.regions), *map(self._described, range(1, self._ranks))]
            sent = super()._send(stream, version)
        except BaseException:
            self._part(self._joint)
            raise
        finally:
            self._talk.stop()
            for _ in self._gathered:
                pass
        return sent if sent.failed else sent._replace(bytes=max(map(sum, self._received)))

    def _described(self, rank: int) -> list[WeightRegion]:
        message = self._talk.hear(rank)
        assert message is not None and "regions" in message, f"trainer rank {rank} sent {message}"
        return [
            WeightRegion(name, tuple(shape), dtype, tuple(rows), tuple(columns), stage)
            for name, shape, dtype, rows, columns, stage in message["regions"]
        ]

    # ---- the group

    @contextmanager
    def _ready(self, servers: ServerSet) -> Iterator[None]:
        try:
            if self._joint != servers.urls:
                self._dissolve()
                self._make_plan(servers)
                self._gathered = gathered_by(self._plan.sources[0], self._weights)
                self._join(servers)
            else:
                self._gathered = gathered_by(self._plan.sources[0], self._weights)
                self._talk.say(begin=True)
            self._received = [[0] * len(server.messages) for server in self._plan.servers]
            yield
        except BaseException:
            self._part(servers.answering)
            raise
        if servers.lost:
            self._part(servers.answering)

    def _part(self, answering: Collection[str]) -> None:
        """The group ends; of its servers those of `answering` are asked to leave it. The other ranks leave it as they
        hear that the publication has ended."""
        self._joint = ()
        self._talk.stop()
        self._asked.intersection_update(answering)
        self._dissolve()

    def _make_plan(self, servers: ServerSet) -> None:
        """Raises RolloutError, also naming a server of another model; ValueError for a weight that has no codes."""
        asked: tuple[str, ...] = ()
        while asked != servers.urls:  # some may be left out
            layouts = servers.get(endpoints.WEIGHTS_LAYOUT, _layout)
            whys = {
                url: other_model(layout, self._regions, self._encoding)
                for url, layout in zip(servers.urls, layouts, strict=True)
            }
            servers.lose(
                {url: RolloutError(f"server {url} cannot serve the weights: {why}") for url, why in whys.items() if why}
            )
            kept = [layout for url, layout in zip(whys, layouts, strict=True) if not whys[url]]
            names, size = self._shards.names, self._target.config.bucket_bytes
            self._plan, asked = make_plan(self._regions, names, kept, self._encoding, size), servers.urls
            servers.change_each(endpoints.PLAN_SLICES, [body_of(self._plan, i).to_json() for i in range(len(asked))])
        if self._plan.gathered:
            _log.warning(
                "publish.path = 'reshard': %d weights of %d bytes are gathered before they are encoded, because "
                "their shards do not end at block boundaries of %s",
                self._plan.gathered,
                self._plan.gathered_bytes,
                self._encoding.spec.format if self._encoding.spec is not None else "",
            )

    def _join(self, servers: ServerSet) -> None:
        target, name = self._target, f"miles-like-{secrets.token_hex(8)}"
        counts = [len(server.messages) for server in self._plan.servers]
        size, seconds = self._ranks + sum(counts), target.timeout_s * _OF_A_REQUEST
        limit = timedelta(seconds=seconds)
        listening = listener(address_towards(servers.urls))
        host, port = listening.getsockname()[:2]
        store = [TCPStore(host, port, None, True, limit, False, master_listen_fd=listening.detach())]
        client = TCPStore(host, port, None, False, limit, False)
        for rank in range(1, self._ranks):
            self._talk.say_to(rank, **plan_body(self._plan.sources[rank]))
        at = {"address": host, "port": port, "name": name, "size": size, "timeout_s": seconds}
        self._talk.say(meeting=at)
        bodies = [
            JoinSlices(
                master_address=host,
                master_port=port,
                rank_offset=self._ranks + sum(counts[:i]),
                world_size=size,
                group_name=name,
                timeout_s=seconds,
            ).to_json()
            for i in range(len(counts))
        ]

        def settled(url: str, error: RolloutError | None) -> None:
            if error is not None:  # the others wait at the store
                later(store.clear)

        asked = self._requests.submit(servers.change_each, endpoints.JOIN_SLICES, bodies, settled)
        self._asked = set(servers.urls)
        leave = partial(_dissolve, store, self._asked, name, target.key)
        try:
            self._membership = Membership(client, name=name, rank=0, size=size, timeout_s=seconds)
        except GroupFailed:
            leave(None)
            asked.result()
            raise
        self._dissolve = once_or_with(self, partial(leave, self._membership))
        asked.result()
        self._joint = servers.urls

    # ---- pieces

    def _encoded(self, stream: Iterator[NamedTensor]) -> Iterator[Bucket]:
        source = Source(self._shards, self._encoding, self._plan.sources[0], self._gathered, self._amax())
        for piece in range(self._plan.pieces):
            prepared = source.prepare(piece)
            self.host.take(prepared.nbytes)
            checksums: Future[dict[str, str]] = Future()
            checksums.set_result({})
            yield Bucket(partial(self._send_piece, piece, prepared), prepared.nbytes, checksums)
        self._hashes = [source.hashes]

    def _amax(self) -> Mapping[str, float]:
        if self._encoding.codec is None or not self._encoding.codec.shared_amax:
            return {}
        found = [largest(self._shards, self._encoding)]
        found += [self._answer(rank, "amax") for rank in range(1, self._ranks)]
        amax = of_bundles(found, self._encoding)
        self._talk.say(amax=amax)
        return amax

    def _send_piece(self, piece: int, prepared: Prepared, servers: ServerSet, _: str | None) -> None:
        self._talk.say(piece=piece)
        body = UpdateFromSlices(group_name=self._membership.name, piece=piece, weight_version=str(self._version))
        asked = self._requests.submit(servers.read, endpoints.UPDATE_FROM_SLICES, body.to_json(), _received)
        try:
            try:
                self._membership.send(prepared.messages)
                self._membership.wait()
            except GroupFailed:
                asked.result()  # of the server that has failed
                raise
            replies = asked.result()
            if servers.lost:
                raise RolloutError("; ".join(fault.why for fault in servers.lost))
        except RolloutError as e:
            self._talk.stop()
            self._raise_cause(e)
            raise
        for url, server, reply, total in zip(servers.urls, self._plan.servers, replies, self._received, strict=True):
            want = [sum(s.nbytes for p, _, found in rank if p == piece for s in found) for rank in server.messages]
            if list(reply.received) != want:
                raise RolloutError(
                    f"server {url} received {list(reply.received)} bytes of piece {piece}, expected {want}"
                )
            total[:] = [a + b for a, b in zip(total, want, strict=True)]

    def _raise_cause(self, e: RolloutError) -> None:
        """Raises RuntimeError where a trainer rank says that it has failed: a server's failure may follow from it."""
        until = time.monotonic() + _CAUSE_S
        for rank in range(1, self._ranks):
            message = self._talk.hear(rank, limit_s=max(0.0, until - time.monotonic()))
            if message is not None and "error" in message:
                raise RuntimeError(f"trainer rank {rank}: {message['error']}") from e

    def _answer(self, rank: int, key: str) -> Any:
        """What a trainer rank says under `key`. Raises RuntimeError for another message, or none within the limit of a
        request."""
        message = self._talk.hear(rank, limit_s=self._target.timeout_s)
        if message is None:
            raise RuntimeError(
                f"trainer rank {rank} did not finish its part within {self._target.timeout_s:g} s "
                "(rollout.request_timeout_s): see its log"
            )
        if key not in message:
            raise RuntimeError(f"trainer rank {rank}: {message.get('error') or message.get('lost') or message}")
        return message[key]

    def _loaded(
        self, servers: ServerSet, buckets: Iterator[Bucket], version: int
    ) -> Iterator[tuple[int, dict[str, str]]]:
        yield from super()._loaded(servers, buckets, version)
        self._hashes += [self._answer(rank, "hashes") for rank in range(1, self._ranks)]
        self._talk.stopped = True  # there is nothing that they wait for
        self._talk.forget()

    def _compared(self, servers: ServerSet, sent: dict[str, str]) -> RankChecksums:
        """What each rank holds with what was sent to it, and then the servers with each other."""
        wrong = {}
        first = dict(zip(self._joint, _firsts(self._ranks, self._plan), strict=True))
        for url, reply in zip(servers.urls, servers.get(endpoints.SLICE_HASHES, _hashes), strict=True):
            for rank, held in enumerate(reply.ranks):
                member = str(first[url] + rank)
                want = {str(i): own[member] for i, own in enumerate(self._hashes) if member in own}
                if held != want:
                    sources = sorted(i for i in held.keys() | want.keys() if held.get(i) != want.get(i))
                    wrong[url] = RolloutError(
                        f"rank {rank} of server {url} has weights that differ from those that trainer ranks "
                        f"{', '.join(sources)} sent"
                    )
        servers.lose(wrong)
        return compare_checksums(servers, None)


def _dissolve(
    store: list[TCPStore], urls: Collection[str], name: str, key: ServerKey | None, membership: Membership | None
) -> None:
    if membership is not None:
        membership.leave()
    tell_to_leave(urls, name, key)
    store.clear()


def _firsts(ranks: int, plan: Plan) -> list[int]:
    """The number in the group of the first rank of each server."""
    counts = [len(server.messages) for server in plan.servers]
    return [ranks + sum(counts[:i]) for i in range(len(counts))]


def body_of(plan: Plan, server: int) -> PlanSlices:
    """The plan of a server, with the stored tensors that it holds."""
    used = sorted({s.tensor for rank in plan.servers[server].messages for _, _, found in rank for s in found})
    place = {tensor: i for i, tensor in enumerate(used)}
    tensors = [(plan.tensors[tensor][0], plan.tensors[tensor][1]) for tensor in used]
    return PlanSlices(
        pieces=plan.pieces,
        tensors=[
            PlannedTensor(name=name, dtype=str(t.dtype).removeprefix("torch."), shape=list(t.shape))
            for name, t in tensors
        ],
        unsent=plan.unsent,
        messages=[
            [
                PlannedMessage(piece=piece, source=source, segments=[[place[s[0]], *s[1:]] for s in found])
                for piece, source, found in rank
            ]
            for rank in plan.servers[server].messages
        ],
    )


def _layout(url: str, endpoint: str, answer: Json) -> LayoutReply:
    try:
        return LayoutReply.from_json(answer, endpoint)
    except ValueError as e:
        raise RolloutError(f"server {url}: {e}") from None


def _hashes(url: str, endpoint: str, answer: Json) -> HashesReply:
    try:
        return HashesReply.from_json(answer, endpoint)
    except ValueError as e:
        raise RolloutError(f"server {url}: {e}") from None


def _received(answer: object) -> SlicesReceived:
    found = SlicesReceived.from_json(answer, endpoints.UPDATE_FROM_SLICES)
    if not found.success:
        raise ValueError(found.message)
    return found
