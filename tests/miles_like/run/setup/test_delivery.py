"""Publications in two parts: what is written, and which servers load it.

Not covered here: servers (tests/laws/test_load_beside_training.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_like.run.setup.delivery import DirectoryDelivery
from miles_like.types import PublishReport, ServerFault
from rollout.publish.publication import Sent
from tests.support.refusals import refuses


class Disk:
    """A trainer that writes, and servers that load: what was asked of them."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    async def write(self, version: int) -> PublishReport:
        self.log.append(f"write {version}")
        directory = Path(f"version_{version}")
        return PublishReport(version=version, bytes=7, seconds=2.0, pause_seconds=0.0, directory=directory, triton=0.25)

    def loads_of(self, urls: Sequence[str], joins: bool) -> Any:
        return Loads(self.log, urls, joins)


class Loads:
    def __init__(self, log: list[Any], urls: Sequence[str], joins: bool) -> None:
        self.log, self.urls, self.joins = log, urls, joins

    def check_versions(self, version: int) -> None:
        self.log.append(f"check {version}")

    def load(self, path: Path, version: int, nbytes: int) -> Sent:
        self.log.append((str(path), version, *self.urls, self.joins))
        lost = (ServerFault(self.urls[0], "gone", answers=False),) if len(self.urls) > 1 else ()
        return Sent(nbytes, pause_seconds=0.5, failed=lost, decoding=0.5)

    def keep_only(self, path: Path) -> None:
        self.log.append(f"keep {path}")


def test_a_version_is_written_once_and_loaded_by_whom_it_is_for() -> None:
    """A server that is replaced loads the files of the others, whatever weights the trainer has by then."""
    disk = Disk()
    delivery = DirectoryDelivery(disk.write, disk.loads_of)
    delivery.connect(["a", "b"])

    async def run() -> list[PublishReport]:
        await delivery.write(1)
        first = await delivery.load(1)
        delivery.connect(["a"], joins=True)
        joined = await delivery.publish(1)
        delivery.connect(["a", "b"])
        return [first, joined, await delivery.publish(2)]

    first, joined, later = asyncio.run(run())
    assert disk.log == [
        *("check 1", "write 1", ("version_1", 1, "a", "b", False), "keep version_1"),
        *(("version_1", 1, "a", True), "keep version_1"),
        *("check 2", "write 2", ("version_2", 2, "a", "b", False), "keep version_2"),
    ]
    assert [f.url for f in first.failed] == ["a"] and not joined.failed
    assert first.seconds >= 2.0 > joined.seconds and later.seconds >= 2.0
    assert (first.version, later.version, first.bytes, first.pause_seconds) == (1, 2, 7, 0.5)
    assert first.triton == joined.triton == 0.25, "of the writing"
    assert first.decoding == later.decoding == 0.5, "of the loading"


def test_another_version_than_the_one_written_is_not_loaded() -> None:
    disk = Disk()
    delivery = DirectoryDelivery(disk.write, disk.loads_of)
    with refuses(RuntimeError, "connect"):
        asyncio.run(delivery.write(1))
    delivery.connect(["a"])
    with refuses(RuntimeError, 1, "none"):
        asyncio.run(delivery.load(1))
    asyncio.run(delivery.write(3))
    with refuses(RuntimeError, 2, 3):
        asyncio.run(delivery.load(2))
    assert disk.log == ["check 3", "write 3"]
