"""Servers of a run that are replaced while it goes on.

A server that a publication left out, or that does not compute with its weights after a second one, is stopped, and
another is started in its slot, at its address: clients and publishers do not change. It joins by one full publication
to it alone and is scored before a request is sent to it. Requests that were in flight on it are sampled again, or
continued from their tokens, by the other servers; where there is none they wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from miles_like.types import PublishReport, ServerFault


class RunningServers(Protocol):
    """The servers that a run has started (miles_like.cluster.rollout_servers)."""

    def replace(self, urls: Collection[str], say: Callable[[str], None]) -> None:
        """Stops servers and starts others in their slots, at their addresses. Returns once they answer. Raises
        RuntimeError naming a server that does not start."""


class Engines(Protocol):
    """The servers as those that sample use them: an EnginePool, or the rollout workers."""

    def expect(self) -> None: ...
    def leave_out(self, urls: Collection[str]) -> None: ...
    def restore(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class RunReplacements:
    """The `Replacements` of a run's checks.

    urls: of all servers. limit: how many may be replaced in all. connect: creates every rank's publisher to some of the
    servers; joins: they join at a version that others serve. publish_version: publishes to the servers that are
    connected.
    """

    servers: RunningServers
    pool: Engines
    urls: tuple[str, ...]
    limit: int
    connect: Callable[[Sequence[str], bool], None]
    publish_version: Callable[[int], Awaitable[PublishReport]]
    say: Callable[[str], None]
    done: int = 0  # of `limit`, replaced so far
    _connected_to_all: bool = field(default=True, init=False)

    @property
    def left(self) -> int:
        return self.limit - self.done

    def expect(self) -> None:
        self.pool.expect()

    def leave_out(self, urls: Collection[str]) -> None:
        self.pool.leave_out(urls)

    async def publish(self, version: int, urls: Collection[str]) -> PublishReport:
        self.pool.leave_out(set(self.urls) - set(urls))
        return await self._publish(version, urls, joins=False)

    async def replace(self, faults: Sequence[ServerFault]) -> None:
        self.pool.leave_out({fault.url for fault in faults})
        for fault in faults:
            self.done += 1
            self.say(f"Replacing server {fault.url} ({self.done} of at most {self.limit}): {fault.why}")
        await asyncio.to_thread(partial(self.servers.replace, [fault.url for fault in faults], self.say))

    async def join(self, version: int, urls: Collection[str]) -> PublishReport:
        return await self._publish(version, urls, joins=True)

    def serve(self) -> None:
        if not self._connected_to_all:
            self.connect(self.urls, False)
            self._connected_to_all = True
        self.pool.restore()

    async def _publish(self, version: int, urls: Collection[str], *, joins: bool) -> PublishReport:
        self._connected_to_all = False
        self.connect([url for url in self.urls if url in urls], joins)
        return await self.publish_version(version)
