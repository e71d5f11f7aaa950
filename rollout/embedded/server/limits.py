"""Bounds on HTTP requests: bytes of a body and of a header, connections, time to arrive.

`BodyLimits` is an ASGI middleware. `BoundedProtocol` is uvicorn's httptools protocol with the bounds that an ASGI
application cannot enforce: on incomplete headers, and on connections that send nothing. A request beyond a bound is
answered with an error message and its connection is closed; other connections are not affected. vLLM bounds headers
with h11 for the same reason (CVE-2025-48956); httptools has no such option but is faster.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from rollout.openai.errors import error_json
from rollout.wire.bodies import MIB
from rollout.wire.endpoints import PLAN_SLICES, UPDATE_FROM_DISTRIBUTED, UPDATE_FROM_TENSOR

WEIGHTS = (UPDATE_FROM_TENSOR, UPDATE_FROM_DISTRIBUTED, PLAN_SLICES)  # the requests with the longest bodies
_SPARE_FILES = 128  # descriptors kept for files, pipes and the listener
_SWEEP_S = 1.0
_SLOWEST = MIB  # bytes/s: a body that arrives faster gets more time
_STALLED_S = 600.0  # after which a connection whose client does not read the answer is aborted
_HELD = 4  # memory for bodies, in bodies of the largest size

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Refused(ValueError):
    """A request beyond a bound: HTTP status and message."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    request_bytes: int  # of a body, except for weights
    weights_bytes: int  # of a body of WEIGHTS, and of a segment or a broadcast of tensors
    samples: int = 16384  # of one /generate
    entries: int = 1 << 23  # log-probabilities of prompts in one reply: about 1 GiB during serialization
    header_bytes: int = 64 << 10
    connections: int = 4096
    arrival_s: float = 30.0  # from the first byte of a request to its last

    @property
    def largest(self) -> int:
        return max(self.request_bytes, self.weights_bytes)

    def body(self, path: str) -> int:
        return self.weights_bytes if path in WEIGHTS else self.request_bytes


def weights_bytes(*, bucket_bytes: int, largest: int, total: int) -> int:
    """Bound on a body of /update_weights_from_tensor: base64 (4/3) of a bucket, which may exceed its size by one
    module's tensors. largest, total: fp32 bytes of the model's largest tensor and of all tensors."""
    return int(1.5 * min(bucket_bytes + 4 * largest, 3 * total)) + 16 * MIB


def affordable_connections(wanted: int) -> int:
    """`wanted`, or as many as there are file descriptors for this process; raises the soft limit if needed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + _SPARE_FILES
    if soft < need:
        soft = min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft - _SPARE_FILES))


class BodyLimits:
    """ASGI middleware that bounds the bytes of each body, and of all bodies held at the same time."""

    def __init__(self, app: App, limits: RequestLimits) -> None:
        self.app = app
        self.limits = limits
        self._held = 0  # bytes of bodies of unfinished requests
        self._room = _HELD * limits.largest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        bound, path = self.limits.body(scope["path"]), scope["path"]
        if (length := _content_length(scope)) > bound:
            await _refuse(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(path, length, bound), path)
            return
        got = 0

        async def counted() -> Message:
            nonlocal got
            message = await receive()
            n = len(message.get("body", b""))
            got += n
            self._held += n
            if got > bound:
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _too_large(path, got, bound))
            if self._held > self._room:
                raise Refused(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    f"request bodies of {self._held:,} bytes are being read at once, but this server's limit is "
                    f"{self._room:,}: send the request again later",
                )
            return message

        try:
            await self.app(scope, counted, send)
        finally:
            self._held -= got


def _content_length(scope: Scope) -> int:
    """The request's Content-Length in bytes; 0 if there is none."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0


def _too_large(path: str, got: int, bound: int) -> str:
    flag = "--bucket-bytes" if path in WEIGHTS else "--max-request-bytes"
    return (
        f"the body has {got:,} bytes or more, but this server reads at most {bound:,}: send less at once, or "
        f"start the server with a larger {flag}"
    )


async def _refuse(send: Send, status: HTTPStatus, message: str, path: str) -> None:
    body = error_json(message, status, path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Arrivals:
    """The connections on which a request is arriving, longest first, and those whose client does not read."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limits = limits
        self.arriving: dict[BoundedProtocol, float] = {}  # connection -> start time
        self.stalled: dict[BoundedProtocol, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def note(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call after adding a connection: sweeps periodically until there are none."""
        if self._timer is None:
            self._timer = loop.call_later(_SWEEP_S, self._sweep, loop)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now, self._timer = time.monotonic(), None
        for connection, since in list(self.arriving.items()):
            if now - since <= self.limits.arrival_s:
                break  # they are in the order of their start times
            connection.check_arrival(now - since)
        for connection, since in list(self.stalled.items()):
            if now - since > _STALLED_S:
                connection.transport.abort()
        if self.arriving or self.stalled:
            self.note(loop)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's httptools protocol with the bounds of `RequestLimits`."""

    def __init__(self, *args: Any, arrivals: Arrivals, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arrivals = arrivals
        self._limits = arrivals.limits
        self._in_header = False
        self._header = 0  # bytes of the header so far
        self._fields = 0  # bytes of complete header fields
        self._received = 0  # bytes of the request so far
        self._refusal: tuple[HTTPStatus, str] | None = None
        self._more = False  # whether another request arrived before the answer to the last one

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._begin()
        if len(self.connections) > self._limits.connections and not self._make_room():
            self._close(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"all {self._limits.connections} connections of this server are in use: try again later, or start "
                "it with a larger --max-connections",
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrivals.arriving.pop(self, None)
        self._arrivals.stalled.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if not self._more:
            super().data_received(data)
        if self._in_header:
            self._header += len(data)
            if self._header > self._limits.header_bytes:
                self._close(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._header_message())
        if self._received > 2 * self._limits.largest:  # the body continues after the answer
            self.transport.close()

    def on_message_begin(self) -> None:
        """A pipelined request is not served: uvicorn would stop reading and not notice a disconnect. As in RFC 9112
        (9.3.2), the connection is closed after the answer and the client repeats the request."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._more, self.cycle.keep_alive = True, False
            super().on_message_begin()
            return
        self._in_header, self._header, self._fields = True, 0, 0
        if self not in self._arrivals.arriving:
            self._begin()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value)
        if self._fields > self._limits.header_bytes:
            self._refusal = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, self._header_message()
            raise ValueError("header")  # ends up in send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_header = False
        if not self._more:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._more:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._more:
            return
        self._arrivals.arriving.pop(self, None)
        self._received = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        self._arrivals.stalled[self] = time.monotonic()
        self._arrivals.note(self.loop)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._arrivals.stalled.pop(self, None)
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        status, message = self._refusal or (HTTPStatus.BAD_REQUEST, "the request is not valid HTTP")
        self._close(status, message)

    def check_arrival(self, seconds: float) -> None:
        """Closes a connection whose request has been arriving for `seconds`, unless enough of it has come."""
        if seconds > self._limits.arrival_s + self._received / _SLOWEST:
            what = (
                f"the request did not arrive within {seconds:.0f} s: send it faster, or start the server with a "
                "larger --arrival-timeout"
            )
            self._close(HTTPStatus.REQUEST_TIMEOUT, what)

    @property
    def _serving(self) -> bool:
        """Whether a whole request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body

    def _begin(self) -> None:
        self._received = 0
        self._arrivals.arriving[self] = time.monotonic()
        self._arrivals.note(self.loop)

    def _make_room(self) -> bool:
        """Closes the connection that has been sending its request for longest, or an idle one. False if all are being
        answered."""
        others = (c for c in (*self._arrivals.arriving, *self.connections) if c is not self)
        for other in others:
            if isinstance(other, BoundedProtocol) and not other._serving and not other.transport.is_closing():
                other._close(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "this server closed the connection, because another client needs it: connect again",
                )
                return True
        return False

    @property
    def _path(self) -> str:
        """Of the request that is being read, "" before its first line is."""
        return str((self.scope or {}).get("path", ""))

    def _header_message(self) -> str:
        return f"the header has more than {self._limits.header_bytes:,} bytes: shorten it"

    def _close(self, status: HTTPStatus, message: str) -> None:
        """Sends the error, unless an answer was started, and closes the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = error_json(message, status, self._path)
            head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            head += f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self._arrivals.arriving.pop(self, None)
        self.transport.close()
