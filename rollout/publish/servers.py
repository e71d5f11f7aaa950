"""Control requests to all servers of a publication at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import httpx
import orjson

from rollout.publish.publication import PublishTarget
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
from rollout.wire.control import ChecksumReply, ChecksumRequest, Outcome
from rollout.wire.replies import Json

_JSON = {"content-type": "application/json"}

Settled = Callable[[str, RolloutError | None], None]
P = ParamSpec("P")
T = TypeVar("T")


def _nothing(url: str, error: RolloutError | None) -> None: ...


def _as_it_is(url: str, endpoint: str, answer: Any) -> Any:
    return answer


def _succeeded(url: str, endpoint: str, answer: Any) -> None:
    outcome = _parsed(url, Outcome.from_json, answer, endpoint)
    if not outcome.success:
        raise RolloutError(f"server {url} refused {endpoint}: {outcome.message}")


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
        return self._post(endpoint, [orjson.dumps(body)] * len(self.urls), _as_it_is)  # encoded once: it may be large

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
        """The complete reply. Raises RolloutError for a compressed one, or for more than REPLY_BYTES."""
        parts, size = [], 0
        with self._http.stream("POST", url + endpoint, content=content, headers=headers) as response:
            check_plain(response, url=url, endpoint=endpoint)
            for part in response.iter_raw():
                parts.append(part)
                size += len(part)
                check_size(size, REPLY_BYTES, url=url, endpoint=endpoint)
        return httpx.Response(response.status_code, content=b"".join(parts))

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
