"""Which servers are published to, and which are asked, while some of a run's are replaced.

Servers and ranks are made up. Not covered: whole runs (tests/laws/test_replaced_servers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest

from miles_like.run.setup.replacing import RunReplacements
from miles_like.types import PublishReport, ServerFault
from rollout.episodes.pool import EnginePool
from tests.support.fakes import FakeEngine

A, B = "http://a", "http://b"


class World:
    """Servers, ranks and console: `log` has what happens to them."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        engines: list[Any] = [FakeEngine(), FakeEngine()]
        for engine, url in zip(engines, (A, B), strict=True):
            engine.url = url
        self.pool = EnginePool(engines, lost=self.log.append)
        self.made = RunReplacements(
            servers=self,
            pool=self.pool,
            urls=(A, B),
            limit=2,
            connect=lambda urls, joins: self.log.append(("connect", list(urls), joins)),
            publish_version=self.publish,
            say=self.log.append,
        )

    def replace(self, urls: Collection[str], say: Callable[[str], None]) -> None:
        self.log.append(("started", list(urls), sorted(self.pool._out)))

    async def publish(self, version: int) -> PublishReport:
        self.log.append(("publish", version))
        return PublishReport(version=version, bytes=1, seconds=0.0, pause_seconds=0.0)


def faults(*urls: str) -> Sequence[ServerFault]:
    return [ServerFault(url, f"server {url} died", answers=False) for url in urls]


def test_a_server_joins_alone_and_all_are_published_to_afterwards() -> None:
    world = World()

    async def run() -> None:
        world.made.expect()
        await world.made.replace(faults(B))
        await world.made.join(4, {B})
        assert world.pool._out, "it is not asked before it serves"
        world.made.serve()

    asyncio.run(run())
    assert world.log == [
        f"Replacing server {B} (1 of at most 2): server {B} died",
        ("started", [B], [1]),
        ("connect", [B], True),
        ("publish", 4),
        ("connect", [A, B], False),
    ]
    assert world.made.left == 1 and not world.pool._out


def test_a_second_publication_leaves_out_what_does_not_answer() -> None:
    world = World()

    async def run() -> None:
        await world.made.publish(4, {A})
        assert sorted(world.pool._out) == [1]
        world.made.serve()
        world.made.serve()

    asyncio.run(run())
    assert world.log == [("connect", [A], False), ("publish", 4), ("connect", [A, B], False)]


def test_a_server_that_is_left_out_is_asked_again_once_it_serves() -> None:
    world = World()
    world.made.expect()
    world.made.leave_out({B})
    assert sorted(world.pool._out) == [1]
    world.made.serve()
    assert not world.pool._out and not world.log, "it has the weights of the others, and all are connected"


def test_a_server_that_does_not_start_is_counted() -> None:
    """The run ends with its error."""
    world = World()

    def broken(urls: Collection[str], say: Callable[[str], None]) -> None:
        raise RuntimeError("rollout server 1 ended with exit code 1")

    world.replace = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="rollout server 1"):
        asyncio.run(world.made.replace(faults(B)))
    assert world.made.left == 1
