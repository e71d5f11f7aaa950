"""Publish weights over HTTP: a stream of whole tensors, encoded, in requests of bounded size.

Every trainer rank has a publisher, because draining the stream is collective; one rank sends. Up to `hold_bytes` are
encoded before the servers are paused, the rest while they are. For a small model the pause lasts only as long as the
transfer, and a large one is never held completely in the sender's memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeVar

import httpx
import orjson

from miles_like.types import NamedTensor, PublishReport
from quant.stream import quantize_stream
from rollout.publish.buckets import cut, gathered
from rollout.publish.publication import PublishTarget, RankChecksums, Sent, publish_stream
from rollout.server_key import ServerKey
from rollout.server_url import tls
from rollout.sglang.client import (
    KEEPALIVE_S,
    PLAIN,
    REPLY_BYTES,
    RolloutError,
    check_plain,
    check_size,
    failure,
    read_json,
)
from rollout.wire import endpoints
from rollout.wire.checksum import tensor_checksum
from rollout.wire.control import (
    SAFETENSORS,
    BeginUpdate,
    ChecksumReply,
    ChecksumRequest,
    EndUpdate,
    Outcome,
    PauseMode,
    PauseRequest,
    UpdateFromTensor,
    encode_safetensors,
    encode_sglang_pickle,
)
from rollout.wire.replies import Json

_JSON = {"content-type": "application/json"}

P = ParamSpec("P")
T = TypeVar("T")


class _Bucket(NamedTuple):
    payload: tuple[str, ...]
    nbytes: int  # of the tensors
    checksums: Future[dict[str, str]]  # empty if the servers report other hashes


class ServerSet:
    """Sends the same request to several servers concurrently, in threads."""

    def __init__(self, urls: Sequence[str], timeout_s: float, key: ServerKey | None = None) -> None:
        self.urls = tuple(u.rstrip("/") for u in urls)
        self._timeout_s = timeout_s
        self._key = key
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        self._http = httpx.Client(
            limits=httpx.Limits(keepalive_expiry=KEEPALIVE_S),
            timeout=timeout,
            trust_env=False,
            verify=tls(*self.urls),
        )
        self._threads = ThreadPoolExecutor(max(1, len(urls)), thread_name_prefix="publish")

    def close(self) -> None:
        self._threads.shutdown()
        self._http.close()

    def ask(self, endpoint: str, body: Json) -> list[Any]:
        """POST to all servers; returns the replies in the order of `urls`. Raises RolloutError with all failures."""

        content = orjson.dumps(body)  # encode once for all servers: the body may hold weights
        headers = _JSON | PLAIN | ({} if self._key is None else self._key.headers(endpoint))

        def post(url: str) -> Any:
            try:
                response = self._read(url, endpoint, content, headers)
            except httpx.HTTPError as e:
                raise failure(e, url=url, endpoint=endpoint, timeout_s=self._timeout_s, log=None) from e
            if endpoint == endpoints.FLUSH_CACHE and response.status_code < 400:
                return None  # the reply is plain text, not JSON
            return read_json(response, url=url, endpoint=endpoint, log=None)

        return self._all(post)

    def _read(self, url: str, endpoint: str, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """The complete reply. Raises RolloutError for a compressed one, or for more than REPLY_BYTES."""
        parts, size = [], 0
        with self._http.stream("POST", url + endpoint, content=content, headers=headers) as response:
            check_plain(response, url=url, endpoint=endpoint)
            for part in response.iter_raw():
                parts.append(part)
                size += len(part)
                check_size(size, REPLY_BYTES, url=url, endpoint=endpoint)
        return httpx.Response(response.status_code, content=b"".join(parts))

    def change(self, endpoint: str, body: Json) -> None:
        """`ask` for an endpoint that replies with an Outcome. Raises RolloutError unless it is a success."""
        for url, answer in zip(self.urls, self.ask(endpoint, body), strict=True):
            outcome = _parsed(url, Outcome.from_json, answer, endpoint)
            if not outcome.success:
                raise RolloutError(f"server {url} refused {endpoint}: {outcome.message}")

    def checksums(self) -> list[ChecksumReply]:
        answers = self.ask(endpoints.CHECKSUM, ChecksumRequest().to_json())
        return [
            _parsed(u, ChecksumReply.from_json, a, endpoints.CHECKSUM) for u, a in zip(self.urls, answers, strict=True)
        ]

    def _all(self, call: Callable[[str], T]) -> list[T]:
        if len(self.urls) == 1:  # a thread would not run beside this one
            return [call(self.urls[0])]
        futures = [self._threads.submit(call, url) for url in self.urls]
        errors = [f.exception() for f in futures]  # wait for all: none may still be writing when the error is raised
        failures = [str(e) for e in errors if isinstance(e, RolloutError)]
        for e in errors:
            if e is not None and not isinstance(e, RolloutError):
                raise e
        if failures:
            raise RolloutError("; ".join(failures))
        return [f.result() for f in futures]


def servers_of(target: PublishTarget) -> ServerSet:
    """A client of the servers of `target`."""
    return ServerSet(target.urls, target.timeout_s, target.key)


def _parsed(url: str, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return parse(*args, **kwargs)
    except ValueError as e:
        raise RolloutError(f"server {url}: {e}") from None


class TensorPublisher:
    """WeightPublisher over /update_weights_from_tensor.

    send: whether this rank sends. hold_bytes: encoded before the servers are paused. After a failure the servers stay
    paused, so that no sample comes from partly updated weights; the RuntimeError names the server and asks for a
    restart.
    """

    every_rank = False

    def __init__(self, target: PublishTarget, *, send: bool, hold_bytes: int = 2 << 30) -> None:
        self._target, self._is_sender, self._hold_bytes = target, send, hold_bytes
        self._mode = PauseMode(target.config.pause_mode)
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="checksums")

    def publish(self, weights: Iterable[NamedTensor], *, version: int) -> PublishReport:
        """Collective over the trainer's ranks. Raises ValueError (weights that cannot be encoded) or RuntimeError."""
        send = partial(self._send, version=version) if self._is_sender else None
        return publish_stream(weights, version=version, send=send)

    def _send(self, stream: Iterator[NamedTensor], version: int) -> Sent:
        buckets = self._encoded(stream)
        held, size = [], 0
        while size < self._hold_bytes and (bucket := next(buckets, None)) is not None:
            held.append(bucket)
            size += bucket.nbytes
        if not held:
            raise ValueError("no weights to publish: the stream is empty")
        servers = servers_of(self._target)
        began = time.perf_counter()
        try:
            servers.ask(endpoints.PAUSE, PauseRequest(mode=self._mode).to_json())
            nbytes, checksums = self._update(servers, itertools.chain(_emptying(held), buckets), version)
            servers.ask(endpoints.CONTINUE, {})
        except (RolloutError, ValueError) as e:  # ValueError: a later tensor cannot be encoded
            raise RuntimeError(
                f"weights of version {version} were not published: {e}. The servers stay paused because they may hold "
                "parts of two versions: restart them, or restart the run with --resume"
            ) from e
        finally:
            servers.close()
        return Sent(nbytes, time.perf_counter() - began, checksums)

    def _update(self, servers: ServerSet, buckets: Iterator[_Bucket], version: int) -> tuple[int, RankChecksums]:
        total, hashed = 0, list[Future[dict[str, str]]]()
        named = str(version) if self._target.kind == "embedded" else None
        servers.change(endpoints.BEGIN_UPDATE, BeginUpdate(weight_version=named).to_json())
        for bucket, last in _with_last(buckets):
            request = UpdateFromTensor(
                serialized_named_tensors=list(bucket.payload),
                load_format=SAFETENSORS if self._target.kind == "embedded" else None,
                flush_cache=False,  # flushed once, after the last: a failed flush would fail the update
                weight_version=str(version) if last else None,
            )
            servers.change(endpoints.UPDATE_FROM_TENSOR, request.to_json())
            total += bucket.nbytes
            hashed.append(bucket.checksums)
        servers.change(endpoints.END_UPDATE, EndUpdate(weight_version=named).to_json())
        flush_cache(servers, self._mode)
        if not self._target.config.verify:
            return total, ()
        sent = {name: h for f in hashed for name, h in f.result().items()}
        return total, compare_checksums(servers, sent if self._target.kind == "embedded" else None)

    def _encoded(self, stream: Iterator[NamedTensor]) -> Iterator[_Bucket]:
        hashed = self._target.config.verify and self._target.kind == "embedded"
        encoded = quantize_stream(gathered(stream, self._target.fused), self._target.spec)
        for part in cut(encoded, self._target.config.bucket_bytes, self._target.fused):
            if self._target.kind == "embedded":
                payload: tuple[str, ...] = (encode_safetensors(part),)
            else:
                payload = encode_sglang_pickle(part, self._target.tp_size)
            # hash in a thread while sending: hashing is slow and releases the GIL
            checksums = self._hashing.submit(_checksums, part if hashed else [])
            yield _Bucket(payload, sum(t.tensor.nbytes for t in part), checksums)


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
