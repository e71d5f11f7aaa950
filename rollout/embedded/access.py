"""Who may ask the embedded server what: an ASGI application around the server's own."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from rollout import wire
from rollout.server_key import VARIABLE, ServerKey

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def check_address(address: str, key: ServerKey | None) -> None:
    """Raises ValueError, with the remedy, for a server without a key whose socket is bound beyond loopback."""
    if key is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ValueError(
            f"serving on {address} without a key lets every client replace the weights: give one in the "
            f"environment variable {VARIABLE} or by --key-file FILE, or serve on 127.0.0.1"
        )


class Access:
    """Refuses, before the body is read: a Host that is not this server's (a page in a browser whose name was made to
    resolve to this address), any Origin (any page in a browser), and, with a key, every path but /health without it.

    host, address: what the server was told to listen on, and the address that this is.
    """

    def __init__(self, app: App, *, host: str, address: str, key: ServerKey | None) -> None:
        self._app = app
        self._key = key
        self._host = host
        bound = ipaddress.ip_address(address.partition("%")[0])
        self._every_address = bound.is_unspecified
        self._names = {"localhost", "127.0.0.1", "::1", host.casefold(), str(bound)}
        if not bound.is_loopback:
            self._names |= {socket.gethostname().casefold(), socket.getfqdn().casefold()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await _answer(send, *refusal)
        else:  # a websocket, which the server has none of
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, sentence)"""
        headers = dict(reversed(scope["headers"]))  # of a name that comes twice, the first
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._known(host):
            return 403, f"Host {host[:200]!r} is not this server's: ask it at the address it listens on, {self._host}"
        if b"origin" in headers:
            return 403, "requests of web pages (with an Origin header) are not served"
        if self._key is None or scope["path"] == wire.HEALTH:  # process monitors have no key
            return None
        given = headers.get(b"authorization")
        if given is None:
            return 401, "this server has a key: send it as `Authorization: Bearer KEY`"
        if not self._key.admits(scope["path"], given):
            return 401, f"the key of this request is not the one that {scope['path'][:200]} asks for"
        return None

    def _known(self, host: str) -> bool:
        name = _without_port(host).casefold()
        if name in self._names:
            return True
        return self._every_address and _is_address(name)  # no page's name, whatever it resolves to


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _answer(send: Send, status: int, message: str) -> None:
    body = orjson.dumps({"error": {"message": message}})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # the body that was not read is not waited for
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
