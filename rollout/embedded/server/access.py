"""Access control of the embedded server, as an ASGI middleware."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from rollout.openai.errors import error_json
from rollout.server_key import VARIABLE, ServerKey, is_sampling
from rollout.wire import endpoints

_EPOCH = endpoints.EPOCH.encode()
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def check_address(address: str, key: ServerKey | None) -> None:
    """Raises ValueError, with the remedy, for a server without a key that listens on an address beyond loopback."""
    if key is None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise ValueError(
            f"serving on {address} without a key would let every client replace the weights: set a key in the "
            f"environment variable {VARIABLE} or with --key-file FILE, or listen on 127.0.0.1"
        )


class Access:
    """Rejects requests before their body is read: those with the Host of another server (DNS rebinding by a web page),
    those with an Origin (web pages), on a server with a key those without it, except to /health, and those of an
    earlier epoch of a run than the server has seen: of a publisher that was stopped or cut off and comes back.

    host, address: the configured host, and the address that the socket is bound to.
    """

    def __init__(self, app: App, *, host: str, address: str, key: ServerKey | None) -> None:
        self._app = app
        self._key = key
        self._host = host
        self._epoch = 0  # the highest so far
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
            await _answer(send, *refusal, scope["path"])
        else:  # a websocket: not supported
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        """(status, message) if the request is rejected."""
        headers = dict(reversed(scope["headers"]))  # the first of headers with the same name
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._known(host):
            return (
                403,
                f"Host {host[:200]!r} is not this server: send requests to the address it listens on, {self._host}",
            )
        if b"origin" in headers:
            return 403, "requests from web pages (with an Origin header) are rejected: send them from a program"
        if scope["path"] == endpoints.HEALTH:  # process monitors have no key
            return None
        if self._key is not None:
            given = headers.get(b"authorization")
            if given is None:
                return 401, "this server requires a key: send it as `Authorization: Bearer KEY`"
            if not self._key.admits(scope["path"], given):
                path = scope["path"][:200]
                return 401, f"the key of this request does not allow {path}: send the key for this endpoint"
        # not where the key for sampling suffices, whose clients must not raise the epoch
        return None if is_sampling(scope["path"]) else self._of_its_epoch(headers.get(_EPOCH))

    def _of_its_epoch(self, given: bytes | None) -> tuple[int, str] | None:
        """Notes the epoch of a request; as `_refusal`. given: None: a client that is no process of a run."""
        if given is None:
            return None
        if not re.fullmatch(rb"[0-9]{1,18}", given):
            return 400, f"{endpoints.EPOCH} is {given[:40]!r}: send a whole number"
        if (epoch := int(given)) < self._epoch:
            return 409, (
                f"this request is of epoch {epoch} of its run, and this server has had requests of epoch "
                f"{self._epoch}: a process that was stopped or cut off changes nothing any more"
            )
        self._epoch = epoch
        return None

    def _known(self, host: str) -> bool:
        name = _without_port(host).casefold()
        if name in self._names:
            return True
        return self._every_address and _is_address(name)  # not a domain name, which a web page could rebind


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


async def _answer(send: Send, status: int, message: str, path: str) -> None:
    body = error_json(message, status, path)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),  # do not wait for the unread body
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
