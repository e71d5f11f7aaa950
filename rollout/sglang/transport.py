"""HTTP/1.1 for large replies: an httpx transport that receives a body into the memory in which it stays.

A reply with the routes of a long sample has tens of megabytes. httpx's own transport takes it through several copies in
pieces of 64 KiB, which costs more of a core than reading the routes. Here httptools parses the head, and the kernel
copies a body of known length to its place.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from typing import Any, cast

import httptools
import httpx
import numpy as np

_SCRATCH = 64 << 10  # bytes of a read, but for a body of known length
_SHARED = 1 << 20  # bytes of the smallest body whose memory serves others
_UNUSED = 256 << 20  # bytes of memory that are kept for bodies
_IDLE = 32  # connections to one server that are kept
Origin = tuple[str, str, int]


class _Memory:
    """Memory for bodies, which serves another one once nothing refers to the body that it held.

    numpy asks for huge pages, with which 86 MB are there in 15 ms; a bytearray takes 75 ms for its pages. At most
    _UNUSED bytes are kept for later bodies. Any thread may drop a body.
    """

    def __init__(self) -> None:
        self._free = deque[np.ndarray[Any, Any]]()

    def of(self, nbytes: int) -> memoryview:
        if nbytes < _SHARED:
            return np.empty(nbytes, np.uint8).data
        memory = self._taken(nbytes)
        if memory is None:
            memory = np.empty(1 << (nbytes - 1).bit_length(), np.uint8)  # what is not written to takes no memory
        body = memory[:nbytes]
        weakref.finalize(body, self._give_back, memory).atexit = False
        return body.data

    def _taken(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        with contextlib.suppress(IndexError):  # a body that is dropped meanwhile removes some
            for _ in range(len(self._free)):
                memory = self._free.pop()  # that was used last is in a cache, if any is
                if nbytes <= memory.nbytes < 4 * nbytes:
                    return memory
                self._free.appendleft(memory)
        return None

    def _give_back(self, memory: np.ndarray[Any, Any]) -> None:
        self._free.append(memory)
        with contextlib.suppress(IndexError):
            while sum(one.nbytes for one in tuple(self._free)) > _UNUSED:
                self._free.popleft()


_memory = _Memory()


class _Connection(asyncio.BufferedProtocol):
    """One connection, which has one request at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self.idle_since = 0.0
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._changed = asyncio.Event()
        self._error: httpx.TransportError | None = None  # why it has ended
        self._complete = True  # whether all of the reply is here, or nothing was asked

    async def ask(self, content: bytes, timeout_s: float | None) -> None:
        """Send a request. Returns when `status` and `headers` are those of its reply. Raises httpx.TransportError."""
        self._parser = httptools.HttpResponseParser(self)
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self._keeps, self._complete = False, False
        self._length: int | None = None  # of the body, where the head has it
        self._parts: list[bytes] = []  # of the body, from the parser
        self._rest: memoryview | None = None  # memory for what has not come of a body of known length
        self.transport.write(content)
        while not self.status:
            await self._progress(timeout_s)

    async def body(self, timeout_s: float | None) -> AsyncIterator[bytes]:
        """In one part, a memoryview, if its length is known and it has not come with the head; else as it comes. Raises
        httpx.TransportError."""
        if self._length is not None and not self._complete:
            whole, at = _memory.of(self._length), sum(map(len, self._parts))
            whole[:at] = b"".join(self._parts)
            self._rest = whole[at:]
            while not self._complete:
                await self._progress(timeout_s)
            yield cast(bytes, whole)
            return
        while self._parts or not self._complete:
            if self._parts:
                yield self._parts.pop(0)
            else:
                await self._progress(timeout_s)

    @property
    def can_be_asked(self) -> bool:
        return self._error is None and self._complete and not self.transport.is_closing()

    @property
    def ends_well(self) -> bool:
        """Whether the server keeps it after the reply, all of which is here."""
        return self.can_be_asked and self._keeps

    async def _progress(self, timeout_s: float | None) -> None:
        if self._error is None:
            self._changed.clear()
            self.transport.resume_reading()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                raise httpx.ReadTimeout(f"no data for {timeout_s} s") from None
        if self._error is not None and not self._complete:
            raise self._error

    def _fail(self, error: httpx.TransportError) -> None:
        self._error = self._error or error
        self.transport.abort()
        self._changed.set()

    # ---- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._scratch if self._complete or self._rest is None else self._rest

    def buffer_updated(self, nbytes: int) -> None:
        if self._complete:
            self._fail(httpx.RemoteProtocolError("the server sent data after its reply"))
        elif self._rest is not None:
            self._rest = self._rest[nbytes:]
            if not self._rest:
                self._complete, self._rest = True, None
                self._changed.set()
        else:
            try:
                self._parser.feed_data(bytes(self._scratch[:nbytes]))
            except httptools.HttpParserError as e:
                self._fail(httpx.RemoteProtocolError(f"the server's reply is not HTTP/1.1: {e}"))
            if self.status and not self._complete:
                self.transport.pause_reading()  # until more of the body is asked for
            self._changed.set()

    def eof_received(self) -> None:
        if self.status and self._length is None and not self._chunked:
            self._complete = True  # the end of the connection is that of the body

    def connection_lost(self, exc: Exception | None) -> None:
        self._error = self._error or (
            httpx.RemoteProtocolError("the server closed the connection") if exc is None else httpx.ReadError(str(exc))
        )
        self._changed.set()

    # ---- called by httptools, also for a second reply to one request, with which the connection ends

    def on_message_begin(self) -> None:
        if self._complete:
            self._fail(httpx.RemoteProtocolError("the server sent two replies to one request"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._complete:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        found = {name.lower(): value for name, value in self.headers}
        self._chunked = b"transfer-encoding" in found
        self._length = int(found[b"content-length"]) if b"content-length" in found else None
        self._keeps, self.status = bool(self._parser.should_keep_alive()), self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if not self._complete:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        self._complete = True


class _Body(httpx.AsyncByteStream):
    def __init__(self, pool: LargeReplies, origin: Origin, connection: _Connection, timeout_s: float | None) -> None:
        self._pool, self._origin, self._connection, self._timeout_s = pool, origin, connection, timeout_s

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._connection.body(self._timeout_s)

    async def aclose(self) -> None:
        self._pool.give_back(self._origin, self._connection)


class LargeReplies(httpx.AsyncBaseTransport):
    """The transport of a client of few servers. Connections are not limited in number; those that are idle are kept for
    `keepalive_s` seconds. Use it from one event loop."""

    def __init__(self, *, tls: ssl.SSLContext, keepalive_s: float) -> None:
        """tls: for https URLs."""
        self._tls, self._keepalive_s = tls, keepalive_s
        self._idle = defaultdict[Origin, list[_Connection]](list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Raises httpx.TransportError. The body has not been received when it returns."""
        url, limits = request.url, request.extensions.get("timeout", {})
        origin = (url.scheme, url.host, url.port or (443 if url.scheme == "https" else 80))
        target = b"%s %s HTTP/1.1\r\n" % (request.method.encode(), url.raw_path)
        head = b"".join(b"%s: %s\r\n" % pair for pair in request.headers.raw)
        content = b"".join((target, head, b"\r\n", await request.aread()))
        connection = self._kept(origin) or await self._connected(origin, limits.get("connect"))
        try:
            await connection.ask(content, limits.get("read"))
        except BaseException:
            connection.transport.abort()
            raise
        body = _Body(self, origin, connection, limits.get("read"))
        return httpx.Response(connection.status, headers=connection.headers, stream=body)

    def give_back(self, origin: Origin, connection: _Connection) -> None:
        """A connection whose reply is read, or is not wanted."""
        kept = self._idle[origin]
        if connection.ends_well and len(kept) < _IDLE:
            connection.idle_since = time.monotonic()
            kept.append(connection)
        else:
            connection.transport.abort()

    async def aclose(self) -> None:
        for connection in (c for kept in self._idle.values() for c in kept):
            connection.transport.close()
        self._idle.clear()

    def _kept(self, origin: Origin) -> _Connection | None:
        """The one that was used last. Closes those that have been idle for too long."""
        kept = self._idle[origin]
        late = time.monotonic() - self._keepalive_s
        while kept and (kept[0].idle_since < late or not kept[0].can_be_asked):
            kept.pop(0).transport.close()
        while kept:
            if (connection := kept.pop()).can_be_asked:
                return connection
        return None

    async def _connected(self, origin: Origin, timeout_s: float | None) -> _Connection:
        scheme, host, port = origin
        tls = self._tls if scheme == "https" else None
        try:
            async with asyncio.timeout(timeout_s):
                _, connection = await asyncio.get_running_loop().create_connection(_Connection, host, port, ssl=tls)
        except TimeoutError as e:
            raise httpx.ConnectTimeout(f"no connection within {timeout_s} s") from e
        except OSError as e:  # ssl.SSLError is one
            raise httpx.ConnectError(str(e)) from e
        return connection
