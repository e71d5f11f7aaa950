"""Whether a server answers, asked over a separate connection: a look costs the driver a fraction of a millisecond."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

_ENDED = 503  # of /health of all three engines: the engine has ended, and the process not yet
_SLICE_S = 0.5
SUSPECT_S = 5.0  # without an answer


class HealthError(RuntimeError):
    """The server computes nothing more. The message names no server."""


async def status_of(url: str, path: str) -> int:
    """The HTTP status of a GET. Raises OSError or ValueError where the answer is none."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n".encode())
        line = (await reader.readline()).split()
        if len(line) < 2:
            raise ValueError(f"{url} closed the connection, or does not speak HTTP")
        return int(line[1])
    finally:
        writer.close()


async def look_at(
    url: str,
    path: str,
    limit_s: float,
    silent: Callable[[str], None],
    status: Callable[[str, str], Awaitable[int]] = status_of,
) -> bool:
    """Whether the server at `url` answers GET `path`; False where it cannot be reached. silent: called when it has not
    answered for SUSPECT_S seconds, then the look goes on. Raises HealthError after `limit_s` seconds, and for an
    engine that has ended.

    Time is counted in slices: where this process itself stood still, a slice that took a minute counts as one."""
    ask = asyncio.ensure_future(status(url, path))
    waited = 0.0
    try:
        while not ask.done():
            await asyncio.wait({ask}, timeout=_SLICE_S)
            waited += _SLICE_S
            if ask.done():
                break
            if waited >= limit_s:
                raise HealthError(f"it hangs: {path} was not answered for {limit_s:g} s (rollout.health_timeout_s)")
            if waited >= SUSPECT_S:
                silent(f"{path} was not answered for {waited:g} s")
        if ask.result() == _ENDED:
            raise HealthError(f"its engine has ended: {path} answers {_ENDED}")
    except (OSError, ValueError):
        return False
    finally:
        ask.cancel()
    return True
