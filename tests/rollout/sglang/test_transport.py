"""A reply comes through `LargeReplies` as through httpx's own transport, in whatever pieces a server sends it."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.sglang.transport import _UNUSED, LargeReplies, _Memory

BODY = bytes(range(256)) * 3
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/octet-stream\r\n"
LENGTH = HEAD + b"content-length: %d\r\n" % len(BODY)
REPLIES = {
    "length": LENGTH + b"\r\n" + BODY,
    "closes": LENGTH + b"connection: close\r\n\r\n" + BODY,
    "chunked": HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\r\n100;x=y\r\n" + BODY[:256] + b"\r\n0\r\n\r\n",
    "empty": HEAD + b"Content-Length: 0\r\n\r\n",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "refused": b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}",
    "to the end": b"HTTP/1.0 200 OK\r\n\r\n" + BODY,
}
FAULTS = {
    "nothing": b"",
    "half a head": LENGTH[:-9],
    "half a body": LENGTH + b"\r\n" + BODY[:300],
    "half a chunk": HEAD + b"transfer-encoding: chunked\r\n\r\n100\r\n" + BODY[:20],
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "two lengths": HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabc",
}
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Found = tuple[int, list[tuple[bytes, bytes]], bytes] | str


async def request(url: str, transport: httpx.AsyncBaseTransport | None, count: int, timeout_s: float) -> list[Found]:
    """What `count` requests find, one after the other: status, headers and body, or that they fail."""
    out: list[Found] = []
    async with httpx.AsyncClient(transport=transport, timeout=timeout_s, trust_env=False) as client:
        for i in range(count):
            try:
                async with client.stream("POST", url, content=b"x" * i) as reply:
                    body = b"".join([part async for part in reply.aiter_raw()])
                out.append((reply.status_code, [(k.lower(), v) for k, v in reply.headers.raw], body))
            except httpx.ReadTimeout:
                out.append("late")
            except httpx.TransportError:
                out.append("fails")
    return out


async def served(serve: Serve, use: Callable[[str], Awaitable[Any]]) -> Any:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        return await use(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a?b=c")
    finally:
        server.close()


def sending(reply: bytes, cuts: Sequence[int], connections: list[int]) -> Serve:
    """A server that sends `reply` to every request, in pieces that end at `cuts`. connections: requests of each."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        keeps = any(word in reply.lower() for word in (b"content-length", b"chunked", b"204"))
        while head := await reader.readuntil(b"\r\n\r\n"):
            connections[-1] += 1
            length = next(int(x.split(b":")[1]) for x in head.lower().split(b"\r\n") if x.startswith(b"content-length"))
            await reader.readexactly(length)
            edges = [0, *sorted(cut for cut in cuts if cut < len(reply)), len(reply)]
            for begin, end in itertools.pairwise(edges):
                writer.write(reply[begin:end])
                await writer.drain()
                await asyncio.sleep(0)
            if not keeps or b"close" in reply:
                break
        writer.close()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    return guarded


async def both(reply: bytes, cuts: Sequence[int], *, count: int = 2, timeout_s: float = 5.0) -> None:
    ours, theirs = list[int](), list[int]()
    keepalive = LargeReplies(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), keepalive_s=5.0)
    found = await served(sending(reply, cuts, ours), lambda url: request(url, keepalive, count, timeout_s))
    want = await served(sending(reply, cuts, theirs), lambda url: request(url, None, count, timeout_s))
    assert found == want
    assert ours == theirs  # connections are kept and closed alike


@pytest.mark.parametrize("name", REPLIES)
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(1, 900), max_size=5))
def test_every_reply_is_that_of_httpx(name: str, cuts: list[int]) -> None:
    asyncio.run(both(REPLIES[name], cuts))


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_reply_fails_as_with_httpx(name: str) -> None:
    reply = FAULTS[name]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        writer.close()

    async def run(transport: httpx.AsyncBaseTransport | None) -> Any:
        return await served(serve, lambda url: request(url, transport, 1, 5.0))

    ours = asyncio.run(run(LargeReplies(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), keepalive_s=5.0)))
    assert ours == asyncio.run(run(None)) == ["fails"]


@pytest.mark.parametrize(
    "sent", [b"", LENGTH, LENGTH + b"\r\n" + BODY[:5]], ids=["no head", "half a head", "half a body"]
)
def test_a_server_that_stops_sending_is_late(sent: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await reader.read()  # until the client gives up
        writer.close()

    transport = LargeReplies(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), keepalive_s=5.0)
    assert asyncio.run(served(serve, lambda url: request(url, transport, 1, 0.2))) == ["late"]


def test_a_connection_is_used_again_until_it_was_idle_for_too_long() -> None:
    async def used(keepalive_s: float) -> list[int]:
        connections = list[int]()
        transport = LargeReplies(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), keepalive_s=keepalive_s)
        await served(sending(REPLIES["length"], (), connections), lambda url: request(url, transport, 3, 5.0))
        return connections

    assert asyncio.run(used(60.0)) == [3]
    assert asyncio.run(used(-1.0)) == [1, 1, 1]


def test_a_reply_that_is_not_read_ends_its_connection() -> None:
    connections = list[int]()

    async def half(url: str) -> None:
        transport = LargeReplies(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), keepalive_s=60.0)
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            for _ in range(2):
                async with client.stream("POST", url, content=b"") as reply:
                    assert reply.status_code == 200

    big = HEAD + b"content-length: %d\r\n\r\n" % (8 << 20) + bytes(8 << 20)
    asyncio.run(served(sending(big, (), connections), half))
    assert len(connections) == 2


def test_a_body_of_known_length_comes_in_one_part() -> None:
    async def parts(url: str) -> list[int]:
        transport = LargeReplies(tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), keepalive_s=60.0)
        client = httpx.AsyncClient(transport=transport, trust_env=False)
        async with client, client.stream("POST", url, content=b"") as reply:
            return [len(part) async for part in reply.aiter_raw()]

    big = HEAD + b"content-length: %d\r\n\r\n" % (3 << 20) + bytes(3 << 20)
    assert asyncio.run(served(sending(big, (100, 70_000, 900_000), []), parts)) == [3 << 20]


def test_the_memory_of_a_body_serves_another_once_nothing_refers_to_it() -> None:
    """What a view of a body has does not change; no more than a bound is kept."""
    memory, big = _Memory(), 3 << 20

    def filled(value: int, nbytes: int = big) -> tuple[memoryview, int]:
        body = memory.of(nbytes)
        body[:] = bytes([value]) * nbytes
        return body, np.frombuffer(body, np.uint8).ctypes.data

    first, place = filled(1)
    view = first[100:200]
    del first
    second, other = filled(2)
    assert other != place and bytes(view) == b"\1" * 100
    del view
    assert filled(3, big - 5)[1] == place
    assert bytes(second[:2]) == b"\2\2" and len(memory.of(big - 5)) == big - 5
    assert filled(4, 40 << 20)[1] not in (place, other), "one that is too small"
    for kept in [[memory.of(100 << 20) for _ in range(3)]]:
        kept.clear()
    assert sum(one.nbytes for one in memory._free) <= _UNUSED
