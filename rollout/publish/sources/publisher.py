"""Publish weights from several trainer ranks, the sources, each in a process group with all ranks of all servers.

A source encodes what it sends, so that encoding takes the less time the more sources there are, and sends a bucket in
its turn (`turns.py`): a server receives one broadcast at a time. The leading source asks the servers for all else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

from miles_like.rank_protocols import WeightSources
from miles_like.types import PublishReport, ServerFault
from quant.registry import codec_or_none
from rollout.publish.buckets import HostBytes
from rollout.publish.group import GroupTransport
from rollout.publish.publication import PublishTarget, Sent
from rollout.publish.publisher import Bucket, TensorPublisher, emptying
from rollout.publish.servers import ServerSet, servers_of
from rollout.publish.sources.part import Part
from rollout.publish.sources.turns import Kind, Message, Silent, Stopped, Turns
from rollout.publish.transports import Send
from rollout.sglang.http_replies import RolloutError


class SourcesPublisher(TensorPublisher):
    """Of a trainer rank; `publish_part` is called on the ranks that are sources, at the same time.

    The failure of one source ends the publication at all of them, with one sentence: that of the leading source, which
    says what the servers serve.
    """

    def __init__(self, target: PublishTarget, *, rank: int) -> None:
        super().__init__(target, send=rank == 0)
        self._transport = GroupTransport(target)
        self._turns: Turns | None = None
        self._active: list[int] = []  # sources with buckets, when the first is sent
        self._settled: set[int] = set()  # sources that do nothing any more in this publication
        self._failure: Message | None = None
        self._early: list[Message] = []  # that are not waited for yet

    @property
    def most_sources(self) -> int:
        """Sources where there are more of them than pipeline stages."""
        return self._target.config.sources

    def publish_part(self, part: Part, *, version: int) -> PublishReport:
        """Send a part of the weights of `version`. Raises ValueError (weights that cannot be encoded, or that engines
        need from one source and get from two) or RuntimeError."""
        began, turns = time.perf_counter(), self._turns
        if turns is None:
            check_together(self._target, part.sources)
            limit_s = self._target.timeout_s + self._target.config.parts_timeout_s
            turns = self._turns = Turns(part.number, part.sources.ranks, part.board, limit_s=limit_s)
        turns.begin(part.publication)
        sent = self._lead(part, turns, version) if part.number == 0 else self._follow(part, turns, version)
        return PublishReport(
            version=version,
            bytes=sent.bytes,
            seconds=time.perf_counter() - began,
            pause_seconds=sent.pause_seconds,
            checksums=sent.checksums,
            failed=sent.failed,
            decoding=sent.decoding,
        )

    # ---- the leading source

    def _lead(self, part: Part, turns: Turns, version: int) -> Sent:
        self._settled, self._failure, self._early = set(), None, []
        error, acknowledged = "trainer rank 0 failed; see its log", False
        try:
            sent = self._send(part.weights, version)
            error, acknowledged = "", not sent.failed
            return sent
        except (RuntimeError, ValueError, OSError) as e:
            error = str(e)
            raise
        finally:
            if turns.others and not self._settled >= set(turns.others):
                turns.stop()  # after an error of this program, which `_send` does not expect
            for other in turns.others:
                turns.post(other, Kind.OUTCOME, error=error, acknowledged=acknowledged)
            if missing := set(turns.others) - self._settled:
                part.abandon(sorted(missing))

    @contextmanager
    def _ready(self, servers: ServerSet) -> Iterator[None]:
        """Each source makes its group after the one before: a server joins one at a time."""
        turns = self._its_turns()
        for other in turns.others:
            turns.post(other, Kind.GO, urls=servers.urls, all=self._sent.empty)
        with self._transport.ready(servers):
            for other in turns.others:
                turns.post(other, Kind.JOIN)
                self._hear(Kind.JOINED, {other})
            yield

    def _ahead(self, buckets: Iterator[Bucket]) -> list[Bucket]:
        """Returns once all sources have encoded ahead."""
        held, turns = super()._ahead(buckets), self._its_turns()
        if turns.number:
            return held
        some, waited_for = ({0} if held else set()), set(turns.others)
        while waited_for:
            message = self._hear(Kind.READY, waited_for)
            waited_for.remove(message["source"])
            some |= {message["source"]} if message["some"] else set()
        self._active = sorted(some)
        return held

    def _loaded(
        self, servers: ServerSet, buckets: Iterator[Bucket], version: int
    ) -> Iterator[tuple[int, dict[str, str]]]:
        turns = self._its_turns()
        if turns.number:
            yield from super()._loaded(servers, buckets, version)
            return
        turns.open(self._active)
        yield from super()._loaded(servers, buckets, version)
        waited_for = set(turns.others)
        while waited_for:
            message = self._hear(Kind.DONE, waited_for)
            waited_for.remove(message["source"])
            yield message["bytes"], message["checksums"]

    def _sends(self, send: Send, servers: ServerSet, version: int, last: bool) -> None:
        turns = self._its_turns()
        active = turns.take()
        if last:
            active.remove(turns.number)
        send(servers, None if active else str(version))
        turns.pass_on(active)

    def _hear(self, kind: Kind, waited_for: set[int]) -> Message:
        """A message of this kind, to the leading source; a source may be ahead of others with its messages. Raises
        RolloutError for a source that has failed."""
        while (early := next((m for m in self._early if m["kind"] == kind), None)) is None:
            self._early.append(self._settle(self._its_turns().hear(waited_for)))
            if self._failure is not None:
                raise RolloutError(self._failure["error"])
        self._early.remove(early)
        return early

    def _settle(self, message: Message) -> Message:
        if message["kind"] in (Kind.DONE, Kind.FAILED, Kind.STOPPED):
            self._settled.add(message["source"])
        if message["kind"] == Kind.FAILED and self._failure is None:
            self._failure = message
        return message

    def _cause(self, error: Exception, servers: ServerSet) -> Exception:
        """Ends the publication at the other sources, and returns the error of the one that failed first. No source
        sends anything afterwards, as far as they answer."""
        turns = self._its_turns()
        if turns.number:
            return error
        turns.stop()
        silent = set(error.sources) if isinstance(error, Silent) else set[int]()
        while left := set(turns.others) - self._settled - silent:
            try:
                self._settle(turns.hear(left))
            except Silent as e:
                silent |= left
                error = e if isinstance(error, Stopped) else error
        if self._failure is None or not isinstance(error, RolloutError):
            return error
        lost = [ServerFault(**fault) for fault in self._failure["lost"]]
        servers.leave_out([fault for fault in lost if fault.url in servers.urls])
        return RolloutError(self._failure["error"]) if isinstance(error, Stopped) else error

    # ---- the others

    def _follow(self, part: Part, turns: Turns, version: int) -> Sent:
        servers: ServerSet | None = None
        try:
            go = self._next(Kind.GO)
            servers = servers_of(replace(self._target, urls=tuple(go["urls"])))
            if go["all"]:
                self._sent.forget()
            self.host = HostBytes(self._hold_bytes, self._target.config.bucket_bytes)
            self._next(Kind.JOIN)
            with self._transport.ready(servers):
                turns.post(0, Kind.JOINED)
                sent = self._send_part(servers, self._encoded(part.weights), version)
                outcome = self._outcome()
                if outcome["error"] or not outcome["acknowledged"]:
                    raise _Lost(outcome["error"])
                self._sent.acknowledge(sent[1])
            return Sent(sent[0])
        except _Lost as e:
            error = str(e)
        except Stopped:
            turns.post(0, Kind.STOPPED)
            error = str(self._outcome()["error"])
        except (RuntimeError, ValueError, OSError, AssertionError) as e:
            self._report(e, servers, turns)
            error = str(self._outcome()["error"])
        finally:
            if servers is not None:
                servers.close()
        if error:
            raise RuntimeError(error)
        return Sent(0)

    def _send_part(self, servers: ServerSet, buckets: Iterator[Bucket], version: int) -> tuple[int, dict[str, str]]:
        turns, total, sent = self._its_turns(), 0, dict[str, str]()
        held = self._ahead(buckets)
        turns.post(0, Kind.READY, some=bool(held))
        for nbytes, hashes in self._loaded(servers, itertools.chain(emptying(held), buckets), version):
            total += nbytes
            sent |= hashes
        turns.post(0, Kind.DONE, bytes=total, checksums=self._sent.checksums(sent))
        return total, sent

    def _report(self, error: Exception, servers: ServerSet | None, turns: Turns) -> None:
        """To the leading source, which may wait for its turn."""
        text = str(error)
        if not isinstance(error, RolloutError):
            text = f"trainer rank {turns.ranks[turns.number]}: {text or type(error).__name__}"
        lost = [] if servers is None else [asdict(fault) for fault in servers.lost]
        turns.post(0, Kind.FAILED, error=text, lost=lost)
        turns.stop_turns([0])

    def _next(self, kind: Kind) -> Message:
        """A message of the leading source. Raises Stopped."""
        message = self._its_turns().hear({0})
        if message["kind"] == Kind.STOP:
            raise Stopped("the leading source has stopped")
        assert message["kind"] == kind, f"the leading source is at {message['kind']}, not at {kind}"
        return message

    def _outcome(self) -> Message:
        while (message := self._its_turns().hear({0}))["kind"] != Kind.OUTCOME:
            pass
        return message

    def _its_turns(self) -> Turns:
        assert self._turns is not None, "a publication needs this rank's part of the weights"
        return self._turns


class _Lost(Exception):
    """The publication has failed, or is not complete on all servers, after this source has sent its part."""


def check_together(target: PublishTarget, sources: WeightSources) -> None:
    """Raises ValueError where two sources send tensors that must travel in one request, because an engine fuses them or
    they share a scale."""
    source_of = {name: number for number in range(len(sources.ranks)) for name in sources.names(number)}
    codec = codec_or_none(target.spec)
    bundles: Iterable[tuple[str, ...]] = (
        () if codec is None else (tuple(codec.bundle_of(name)) for name in source_of if name.endswith(".weight"))
    )
    for names in itertools.chain(target.fused, bundles):
        found = {source_of[name]: name for name in names if name in source_of}
        if len(found) > 1:
            (one, first), (other, second), *_ = found.items()
            raise ValueError(
                f"trainer ranks {sources.ranks[one]} and {sources.ranks[other]} would send {first} and {second}, "
                "which servers load only in one request: set publish.sources = 1, or publish.path = 'disk'"
            )
