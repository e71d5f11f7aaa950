"""Serves the page of a run while it is written: on loopback, or elsewhere with a token. It changes no file.

A page of another site can make a browser ask this server under a name that it resolves to this machine. Its name is
then in the request's Host, and the request is refused: allowed are `localhost`, addresses, and this machine's names.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from miles_like.page.live_run import LiveRun
from miles_like.page.write import page_text

COOKIE = "miles_like_watch"
POLL_S = 2.0
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}
_WAITING = (
    '<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="3">'
    "<title>waiting</title><p>The run has no step yet. This page asks again every 3 s.</p></html>\n"
)


def listening(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any free one. Raises ValueError where there can be none."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {port}: give a port from 0 to {(1 << 16) - 1}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((str(address[0]), int(address[1])), family=family)
    except (OSError, UnicodeError) as e:
        reason = str(e)
        if isinstance(e, OSError) and not isinstance(e, socket.gaierror) and e.errno is not None:
            reason = os.strerror(e.errno)  # the text of create_server has the address too
        raise ValueError(
            f"cannot listen on {host}:{port} ({reason}): give another --port, or an address of this machine as --host"
        ) from None


def token_for(listener: socket.socket) -> str | None:
    """None on loopback; elsewhere a random token, which requests must have."""
    return None if _address(listener).is_loopback else secrets.token_urlsafe(24)


def url_of(listener: socket.socket, token: str | None) -> str:
    """What a user opens."""
    address, port = _address(listener), listener.getsockname()[1]
    host = socket.gethostname() if address.is_unspecified else f"[{address}]" if address.version == 6 else str(address)
    return f"http://{host}:{port}/" + ("" if token is None else f"?token={token}")


def _address(listener: socket.socket) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])


def serve(run: LiveRun, listener: socket.socket, token: str | None, *, poll_s: float = POLL_S) -> None:
    """Blocks until the process is interrupted."""
    import uvicorn

    config = uvicorn.Config(app(run, token, poll_s=poll_s), log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


def app(run: LiveRun, token: str | None, *, poll_s: float = POLL_S) -> ASGIApp:
    """GET `/`, `/rows`, `/data` and `/samples`. poll_s: between two questions of a page."""

    def page(request: Request) -> Response:
        if not run.refresh():
            return HTMLResponse(_WAITING)
        data, settings = run.data(), run.settings(poll_s)
        return HTMLResponse(page_text([data["run"]], run.samples(), settings | {"generation": data["generation"]}))

    def rows(request: Request) -> Response:
        asked = request.query_params
        try:
            after, generation = float(asked["after"]), int(asked["generation"])
        except (KeyError, ValueError):
            return PlainTextResponse("give after=STEP and generation=N", 400)
        return JSONResponse(run.since(after, generation, asked.get("events", "")))

    def data(request: Request) -> Response:
        return JSONResponse(run.data() if run.refresh() else {}, 200 if run.rows else 404)

    def samples(request: Request) -> Response:
        return JSONResponse(run.samples())

    routes = {"/": page, "/rows": rows, "/data": data, "/samples": samples}
    made = [Route(path, _answering(answer), methods=["GET"]) for path, answer in routes.items()]
    return Guard(Starlette(routes=made), token)


def _answering(answer: Callable[[Request], Response]) -> Callable[[Request], Any]:
    """Files are read in a thread; a damaged one is an answer in words."""

    async def endpoint(request: Request) -> Response:
        try:
            return await run_in_threadpool(answer, request)
        except (ValueError, OSError) as e:
            return PlainTextResponse(f"{e}\n", 503)

    return endpoint


class Guard:
    """Refuses requests of other hosts' names and, with a token, those without it. `/?token=...` makes it a cookie."""

    def __init__(self, inner: ASGIApp, token: str | None) -> None:
        self._inner, self._token = inner, token
        self._names = {"localhost", socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        refusal = self._refusal(scope)
        answer: ASGIApp = self._inner if refusal is None else refusal

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                added = [(k.lower().encode(), v.encode()) for k, v in HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *added]}
            await send(message)

        await answer(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        if not self._is_own(host_name(headers.get("host", ""))):
            return PlainTextResponse("this server is not asked under that host name\n", 403)
        if self._token is None or self._has_token(headers):
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if scope["path"] == "/" and self._is_token(given):
            reply = RedirectResponse("/", 303)
            reply.set_cookie(COOKIE, given, httponly=True, samesite="strict", path="/")
            return reply
        return PlainTextResponse("open the URL that `miles-like watch` has printed: it has a token\n", 401)

    def _is_own(self, name: str) -> bool:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return address.is_loopback or self._token is not None

    def _has_token(self, headers: Mapping[str, str]) -> bool:
        kind, _, given = headers.get("authorization", "").partition(" ")
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        found = given if kind.lower() == "bearer" else "" if cookie is None else cookie.value
        return self._is_token(found)

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def host_name(host: str) -> str:
    """Of a Host header, without the port, in lower case: `[::1]:8000` is `::1`."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] if ":" in host else host
    return name.lower().rstrip(".")
