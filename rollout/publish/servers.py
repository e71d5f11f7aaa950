"""Control requests to all servers of a publication at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from enum import Enum
from typing import Any, NamedTuple, ParamSpec, TypeVar

import httpx
import orjson

from miles_like.protocols import Fencing
from miles_like.types import ServerFault
from rollout.publish.publication import PublishTarget
from rollout.server_key import ServerKey
from rollout.server_url import tls
from rollout.sglang.client import KEEPALIVE_S
from rollout.sglang.http_replies import (
    PLAIN,
    REPLY_BYTES,
    NoAnswer,
    RolloutError,
    ServerBroke,
    check_plain,
    check_size,
    failure,
    read_json,
)
from rollout.wire import endpoints, vllm_endpoints
from rollout.wire.bodies import MemoryTag
from rollout.wire.control import BeginUpdate, ChecksumReply, ChecksumRequest, EndUpdate, ModelInfo, Outcome
from rollout.wire.replies import Json, an_object, need

_JSON = {"content-type": "application/json"}
_PIECE = 1 << 20  # bytes of a body that are written at once
_GIVE_UP_S = 10.0  # for a server to drop an update
OLD_SERVED = (
    "The servers that answer still serve the previous version: restart the others, or restart the run with --resume"
)

Settled = Callable[[str, RolloutError | None], None]
P = ParamSpec("P")
T = TypeVar("T")


class Stage(Enum):
    """How far a publication has come."""

    ASKED = "asked"  # for their versions; nothing has changed
    PAUSED = "paused"  # the servers, or some
    BEGUN = "begun"  # an update; embedded servers hold it back until it is complete
    ENDING = "ending"  # that update: some may serve it
    CHANGED = "changed"  # weights that are served


def _nothing(url: str, error: RolloutError | None) -> None: ...


def _as_it_is(url: str, endpoint: str, answer: Any) -> Any:
    return answer


def _succeeded(url: str, endpoint: str, answer: Any) -> None:
    outcome = _parsed(url, Outcome.from_json, answer, endpoint)
    if not outcome.success:
        raise RolloutError(f"server {url} rejected {endpoint}: {outcome.message}")


class ServerSet:
    """Sends the same request to several servers concurrently, in threads.

    A server whose request fails is entered in `lost` and gets no further requests. goes_on: raise no error while other
    servers are left, or while a lost server does not answer or has an internal error: only if all servers reject a
    request is the request itself wrong. fence: the epoch of the run: checked before each request and sent with it; an
    embedded server refuses that of an earlier epoch than it has seen.
    """

    def __init__(
        self,
        urls: Sequence[str],
        timeout_s: float,
        key: ServerKey | None = None,
        *,
        goes_on: bool = False,
        fence: Fencing | None = None,
    ) -> None:
        self._fence = fence
        self.urls = tuple(u.rstrip("/") for u in urls)
        self.lost: tuple[ServerFault, ...] = ()
        self.decoding: float | None = (
            None  # share of embedded servers in which Triton kernels decode; None: there are none
        )
        self._goes_on = goes_on
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

    @property
    def answering(self) -> tuple[str, ...]:
        """URLs of the servers that have answered each request, those that failed or refused one too."""
        return (*self.urls, *(fault.url for fault in self.lost if fault.answers))

    @property
    def some_failed(self) -> bool:
        """Whether a lost server did not answer, or had an internal error: the request may be right."""
        return any(not fault.refused for fault in self.lost)

    def close(self) -> None:
        self._threads.shutdown()
        self._http.close()

    def ask(self, endpoint: str, body: Json) -> list[Any]:
        """POST to all servers; returns the replies in the order of `urls`. Raises RolloutError with all failures."""
        return self._post(endpoint, [orjson.dumps(body)] * len(self.urls), _as_it_is)  # encoded once: it may be large

    def resume(self) -> None:
        """Lets the servers generate again. An embedded server answers whether Triton kernels decode (`decoding`)."""
        replies = self.ask(endpoints.CONTINUE, {})
        found = [bool(reply["triton"]) for reply in replies if isinstance(reply, dict) and "triton" in reply]
        self.decoding = sum(found) / len(found) if found else None

    def get(self, endpoint: str, check: Callable[[str, str, Any], T]) -> list[T]:
        """GET from all servers; returns what `check` makes of URL, endpoint and reply of each. Raises RolloutError as
        `ask`, also of `check`."""
        return self._post(endpoint, [b""] * len(self.urls), check)

    def change(self, endpoint: str, body: Json, settled: Settled = _nothing) -> None:
        """`ask` for an endpoint that replies with an Outcome. Raises RolloutError unless it is a success.

        settled: called with the URL of each server as soon as it has answered, and its failure if it has failed; in a
        thread for each.
        """
        self._post(endpoint, [orjson.dumps(body)] * len(self.urls), _succeeded, settled)

    def change_each(self, endpoint: str, bodies: Sequence[Json], settled: Settled = _nothing) -> None:
        """As `change`, with a body for each server in the order of `urls`."""
        self._post(endpoint, [orjson.dumps(body) for body in bodies], _succeeded, settled)

    def _post(
        self,
        endpoint: str,
        contents: Sequence[bytes],
        check: Callable[[str, str, Any], T],
        settled: Settled = _nothing,
    ) -> list[T]:
        content_of = dict(zip(self.urls, contents, strict=True))
        headers = _JSON | PLAIN | ({} if self._key is None else self._key.headers(endpoint))
        if self._fence is not None:
            self._fence.check()
            headers |= {endpoints.EPOCH: str(self._fence.epoch)}

        def post(url: str) -> T:
            try:
                response = self._read(url, endpoint, content_of[url], headers)
            except httpx.HTTPError as e:
                raise failure(e, url=url, endpoint=endpoint, timeout_s=self._timeout_s, log=None) from e
            if endpoint == endpoints.FLUSH_CACHE and response.status_code < 400:
                return check(url, endpoint, None)  # the reply is plain text, not JSON
            return check(url, endpoint, read_json(response, url=url, endpoint=endpoint, log=None))

        def posted(url: str) -> T:
            try:
                reply = post(url)
            except RolloutError as e:
                settled(url, e)
                raise
            settled(url, None)
            return reply

        return self._all(posted)

    def _read(self, url: str, endpoint: str, content: bytes, headers: Mapping[str, str]) -> httpx.Response:
        """The complete reply, to a GET where there is no content. Raises RolloutError for a compressed one, or for more
        than REPLY_BYTES."""
        parts, size = [], 0
        method = "POST" if content else "GET"
        # a request of httpx is part of a cycle: bytes that it refers to would stay in memory until a garbage collection
        length = {"content-length": str(len(content))} if content else {}
        body = _pieces(content) if content else None
        with self._http.stream(method, url + endpoint, content=body, headers={**headers, **length}) as response:
            check_plain(response, url=url, endpoint=endpoint)
            for part in response.iter_raw():
                parts.append(part)
                size += len(part)
                check_size(size, REPLY_BYTES, url=url, endpoint=endpoint)
        return httpx.Response(response.status_code, content=b"".join(parts))

    def read(self, endpoint: str, body: Json, parse: Callable[[Any], T]) -> list[T]:
        """`ask`, with each reply as `parse` reads it. Raises RolloutError as `ask`, also where that raises a
        ValueError."""
        return self._post(endpoint, [orjson.dumps(body)] * len(self.urls), lambda url, _, x: _parsed(url, parse, x))

    def checksums(self) -> list[ChecksumReply]:
        body = orjson.dumps(ChecksumRequest().to_json())
        return self._post(endpoints.CHECKSUM, [body] * len(self.urls), _checksums)

    def lose(self, errors: Mapping[str, RolloutError]) -> None:
        """Leave servers out, by their URLs. Raises RolloutError as the class says."""
        self.urls = tuple(url for url in self.urls if url not in errors)
        self.lost += tuple(
            ServerFault(
                url,
                str(e),
                answers=not isinstance(e, NoAnswer),
                refused=not isinstance(e, NoAnswer | ServerBroke),
            )
            for url, e in errors.items()
        )
        at_fault = not self.urls and not self.some_failed
        if errors and (at_fault or not self._goes_on):
            raise RolloutError("; ".join(map(str, errors.values())))

    def leave_out(self, faults: Sequence[ServerFault]) -> None:
        """Leave out servers that another sender has lost."""
        left = {fault.url for fault in faults}
        self.urls = tuple(url for url in self.urls if url not in left)
        self.lost += tuple(faults)

    def _all(self, call: Callable[[str], T]) -> list[T]:
        if len(self.urls) == 1:  # a thread would not run beside this one
            found = [_result(call, self.urls[0])]
        else:
            futures = [self._threads.submit(_result, call, url) for url in self.urls]
            wait(futures)  # none may still be writing when an error is raised
            found = [f.result() for f in futures]
        self.lose({url: x for url, x in zip(self.urls, found, strict=True) if isinstance(x, RolloutError)})
        return [x for x in found if not isinstance(x, RolloutError)]


def _pieces(content: bytes) -> Iterator[bytes]:
    for start in range(0, len(content), _PIECE):
        yield content[start : start + _PIECE]


def _result(call: Callable[[str], T], url: str) -> T | RolloutError:
    try:
        return call(url)
    except RolloutError as e:
        return e


def states_of(target: PublishTarget, version: int | None = None) -> list[tuple[str, str, bool]]:
    """For each server: weight version, start time, and whether it has weights. Equal values at two times mean that the
    server still has the same weights. Empty if a server does not answer, or serves another version than `version`."""
    servers = ServerSet(target.urls, target.timeout_s, target.key, fence=target.fence)
    try:
        infos = servers.get(endpoints.SERVER_INFO, lambda url, endpoint, answer: an_object(answer, endpoint))
    except (RolloutError, ValueError):
        return []
    finally:
        servers.close()
    weights = MemoryTag.WEIGHTS.value
    states = [
        (str(info.get("weight_version")), str(info.get("started_ts")), info.get("held_bytes", {}).get(weights) != 0)
        for info in infos
    ]
    return states if version is None or all(served == str(version) for served, _, _ in states) else []


class Held(NamedTuple):
    """The state of a server before a publication."""

    path: str  # directory that it has loaded last, from which it was started if it has loaded none since
    version: str
    checksum: str  # of all its weights


def held_by(target: PublishTarget) -> dict[str, Held]:
    """The state of each server by its URL. Empty if a server does not answer, or has no weights."""
    servers = ServerSet(target.urls, target.timeout_s, target.key, fence=target.fence)
    try:
        infos = servers.get(
            endpoints.MODEL_INFO, lambda url, endpoint, answer: _parsed(url, ModelInfo.from_json, answer, endpoint)
        )
        sums = servers.checksums()
    except RolloutError:
        return {}
    finally:
        servers.close()
    return {
        url: Held(info.model_path, info.weight_version, reply.per_engine_checksum)
        for url, info, reply in zip(servers.urls, infos, sums, strict=True)
    }


def servers_of(target: PublishTarget) -> ServerSet:
    """A client of the servers of `target`."""
    return ServerSet(target.urls, target.timeout_s, target.key, goes_on=target.goes_on, fence=target.fence)


def check_versions(servers: ServerSet, version: int, *, kind: str) -> None:
    """Raises RolloutError naming a server that serves a later version than `version`, before anything is sent to one:
    the samples of two models would have the same version."""

    def earlier(url: str, endpoint: str, answer: Any) -> None:
        served = _parsed(url, _version_of, answer, endpoint)
        if served.isdecimal() and int(served) > version:
            raise RolloutError(
                f"server {url} already serves the later version {served}: publish version {served} or later, or "
                "restart the server"
            )

    servers.get(vllm_endpoints.WEIGHT_INFO if kind == "vllm" else endpoints.MODEL_INFO, earlier)


def _version_of(answer: object, endpoint: str) -> str:
    if endpoint == vllm_endpoints.WEIGHT_INFO:
        return str(need(an_object(answer, endpoint), "weight_version", endpoint))
    return ModelInfo.from_json(answer, endpoint).weight_version


def serve_again(urls: Sequence[str], target: PublishTarget, version: int | None) -> None:
    """Let servers that still have the previous version generate again. version: that of an update that they may have
    begun: an embedded server then drops its tensors, and a stock server has received none. A server that fails here has
    failed before. One that does not answer is asked once. Raises as `Fencing.check` alone."""
    limit = min(target.timeout_s, _GIVE_UP_S)
    dropping = ServerSet(urls, limit, target.key, goes_on=True, fence=target.fence)
    named = str(version) if target.kind == "embedded" else None
    with contextlib.suppress(RolloutError):
        if version is not None:
            if named is not None:  # one without tensors takes its place
                dropping.change(endpoints.BEGIN_UPDATE, BeginUpdate(weight_version=named).to_json())
            dropping.change(endpoints.END_UPDATE, EndUpdate(weight_version=named).to_json())
    continuing = ServerSet(dropping.answering, limit, target.key, goes_on=True, fence=target.fence)
    with contextlib.suppress(RolloutError):
        continuing.ask(vllm_endpoints.RESUME if target.kind == "vllm" else endpoints.CONTINUE, {})
    for servers in (dropping, continuing):
        servers.close()


def _checksums(url: str, endpoint: str, answer: Any) -> ChecksumReply:
    return _parsed(url, ChecksumReply.from_json, answer, endpoint)


def _parsed(url: str, parse: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return parse(*args, **kwargs)
    except ValueError as e:
        raise RolloutError(f"server {url}: {e}") from None
