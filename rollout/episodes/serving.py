"""Which engines of a process get requests. All its pools share one `Serving`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from miles_like.types import ServerLost

Lost = Callable[[str, ServerLost], None]  # URL of an engine that does not answer, and how it failed


def _nothing(url: str, error: ServerLost) -> None: ...


def url_of(engine: Any) -> str:
    """The URL of a client; an engine in this process has none."""
    return str(getattr(engine, "url", ""))


class Serving:
    """URLs of the engines that get requests.

    An engine that does not answer gets no request until `serve`; what it was asked is asked elsewhere. Where no engine
    is left, requests wait for the next `serve`, for `limit_s` seconds at most, or until `end`.
    """

    def __init__(self, urls: Collection[str], lost: Lost = _nothing, *, limit_s: float) -> None:
        """lost: called with the first failure of an engine since it serves."""
        self._urls, self._lost, self._limit_s = set(urls), lost, limit_s
        self._why: str | None = None
        self._changed = asyncio.Event()
        self.reissued = 0  # prompts and continued samples that another engine was asked again

    def __contains__(self, engine: Any) -> bool:
        return url_of(engine) in self._urls

    def serve(self, urls: Collection[str]) -> None:
        """From now on the engines at `urls` get requests, and no others."""
        self._urls = set(urls)
        self._wake()

    def end(self, why: str) -> None:
        """No engine will serve again: requests that find none raise ServerLost with `why`."""
        self._why = why
        self._wake()

    def lose(self, engine: Any, error: ServerLost) -> None:
        """An engine did not answer."""
        if engine in self:
            self._urls.discard(url := url_of(engine))
            self._lost(url, error)

    async def some(self, engines: Collection[Any]) -> None:
        """Return once one of `engines` serves. Raises ServerLost where none does within the limit, or ever will."""
        deadline = asyncio.get_running_loop().time() + self._limit_s
        while not any(engine in self for engine in engines):
            if self._why is not None:
                raise ServerLost(self._why)
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                urls = ", ".join(map(url_of, engines))
                raise ServerLost(
                    f"no rollout server has served for {self._limit_s:g} s (cluster.timeout_s): {urls}; see the "
                    "console for their states, then run again with --resume"
                ) from None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
