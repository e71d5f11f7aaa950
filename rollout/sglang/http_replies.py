"""What a request to a server can end with: the body of its reply, or a RolloutError that names the server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import orjson

from miles_like.types import ServerLost
from rollout.server_key import VARIABLE
from rollout.sglang.phases import log_of, see_log
from rollout.wire.replies import error_message

PLAIN = {"accept-encoding": "identity"}
REPLY_BYTES = 64 << 20  # limit on a reply, except those of /generate


class Received(NamedTuple):
    """A reply without its headers."""

    status_code: int
    content: bytes | memoryview


class RolloutError(RuntimeError):
    """A request to a server failed. The message names the server, what happened and what to do."""


class NoAnswer(RolloutError, ServerLost):
    """The server has died, hangs, or cannot be reached."""


class ServerBroke(RolloutError):
    """The server answered with an internal error (HTTP 5xx)."""


class EngineEnded(ServerBroke, ServerLost):
    """The server answered that its engine has ended (HTTP 503): it computes nothing more."""


def failure(error: httpx.HTTPError, *, url: str, endpoint: str, timeout_s: float, log: Path | None) -> RolloutError:
    """The RolloutError for an exception of httpx. log: the server's or its directory, if this run started it."""
    look = see_log(url, log)
    if isinstance(error, httpx.ConnectError) and "[SSL" in str(error):
        reason = re.sub(r" \(_ssl\.c:\d+\)", "", str(error))  # a line of CPython's source
        return RolloutError(
            f"server {url}: the TLS connection for {endpoint} failed ({reason}): for a private certificate, set "
            "SSL_CERT_FILE to the file of its authority; for a server without TLS, use an http:// URL"
        )
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return NoAnswer(f"server {url} cannot be reached for {endpoint}: it is not running or has died; {look}")
    if isinstance(error, httpx.TimeoutException):
        late = f"server {url} did not answer {endpoint} within {timeout_s:g} s: it hangs or is overloaded"
        return NoAnswer(f"{late}; raise rollout.request_timeout_s, or {look}")
    if isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError):
        return NoAnswer(f"server {url} closed the connection during {endpoint}: it died or was killed; {look}")
    return RolloutError(f"server {url} failed at {endpoint}: {type(error).__name__}: {error}; {look}")


_NEEDS_KEY = "pass the server's key with --key-file, key_file or the environment variable " + VARIABLE
REMEDIES: Mapping[int, str] = {401: _NEEDS_KEY, 403: _NEEDS_KEY}  # by the status of a refusal


def read_json(
    response: httpx.Response | Received,
    *,
    url: str,
    endpoint: str,
    log: Path | None,
    remedies: Mapping[int, str] = REMEDIES,
    loads: Callable[[bytes | memoryview], Any] = orjson.loads,
) -> Any:
    """The body, as `loads` reads it. Raises RolloutError for HTTP 4xx and 5xx and for a body that is not JSON."""
    if response.status_code >= 400:
        text = error_message(response.status_code, bytes(response.content))
        if (remedy := remedies.get(response.status_code)) is not None:
            text += f"; {remedy}"
        look = f"; see {log_of(url, log)}" if log else ""
        kind = {503: EngineEnded}.get(response.status_code, ServerBroke)
        raise (kind if response.status_code >= 500 else RolloutError)(f"server {url} rejected {endpoint}: {text}{look}")
    try:
        return loads(response.content) if response.content else None
    except ValueError as e:
        raise RolloutError(
            f"server {url} answered {endpoint} with invalid JSON ({e}): check which program listens there"
        ) from None


def check_plain(response: httpx.Response, *, url: str, endpoint: str) -> None:
    """Raises RolloutError for a compressed reply, before its body is read: the decompressed size has no bound."""
    coded = response.headers.get("content-encoding", "identity")
    if coded != "identity":
        raise RolloutError(f"server {url} compressed its reply to {endpoint} ({coded[:40]}): disable that in its proxy")


def check_size(size: int, limit: int, *, url: str, endpoint: str) -> None:
    """Raises RolloutError if `size`, the bytes of the body read so far, exceeds `limit`."""
    if size > limit:
        raise RolloutError(
            f"server {url} answered {endpoint} with more than {limit:,} bytes, the limit for such a request: "
            "check which program listens there"
        )
