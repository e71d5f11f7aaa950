"""Publications in two parts: trainer ranks write a version to a directory, and servers get it without the trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from miles_like.protocols import TrainerRanks
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.types import PublishReport
from rollout.publish.directory.differences import StoredDifferences
from rollout.publish.directory.loads import DirectoryLoads
from rollout.publish.directory.stored_sends import StoredSends
from rollout.server_url import on_loopback
from routing_replay.versions import version_of

LOADS: Mapping[str, type[DirectoryLoads]] = {  # by publish.path
    "disk": DirectoryLoads,
    "delta": StoredDifferences,
    "tensor": StoredSends,
    "distributed": StoredSends,
}


def publication_of(
    rollout: RolloutSide, trainer: TrainerRanks, urls: Sequence[str], *, goes_on: bool, life: int = 0
) -> TrainerPublication | DirectoryDelivery:
    """To the servers at `urls`, by publish.during_training. goes_on: as in `PublishTarget`. life: of the trainer's
    ranks."""
    if not rollout.plan.config.publish.during_training:
        whole = TrainerPublication(rollout, trainer, goes_on=goes_on)
        whole.connect(urls)
        return whole
    trainer.connect(rollout.publisher(urls, goes_on=goes_on, loads=False))

    def loads_of(urls: Sequence[str], joins: bool) -> DirectoryLoads:
        here = all(map(on_loopback, urls))  # on the host of this process, which may not be that of a rank
        target = replace(rollout.target(urls, goes_on=goes_on, joins=joins), handles="memory" if here else None)
        return LOADS[target.config.path](target, rollout.published)

    delivery = DirectoryDelivery(lambda version: trainer.publish(version=version), loads_of, life)
    delivery.connect(urls)
    return delivery


class TrainerPublication:
    """Publications that trainer ranks make from end to end."""

    def __init__(self, rollout: RolloutSide, trainer: TrainerRanks, *, goes_on: bool) -> None:
        self._rollout, self._trainer, self._goes_on = rollout, trainer, goes_on

    def connect(self, urls: Sequence[str], joins: bool = False) -> None:
        self._trainer.connect(self._rollout.publisher(urls, goes_on=self._goes_on, joins=joins))

    async def publish(self, version: int) -> PublishReport:
        return await self._trainer.publish(version=version)


class DirectoryDelivery:
    """The `Delivery` of a run's versions (miles_like.loop.overlapped), whose requests are sent by this process.

    A version is written once. `publish` of one that is written lets servers load the same files again, also while the
    trainer has other weights.
    """

    def __init__(
        self,
        write_version: Callable[[int], Awaitable[PublishReport]],
        loads_of: Callable[[Sequence[str], bool], DirectoryLoads],
        life: int = 0,
    ) -> None:
        """write_version: collective over the trainer's ranks; its report has the directory. loads_of: for servers by
        URL, and whether they join at a version that others serve. life: of the trainer's ranks (`version_of`)."""
        self._life = life
        self._write_version, self._loads_of = write_version, loads_of
        self._loads: DirectoryLoads | None = None
        self._written: PublishReport | None = None
        self._new = False  # whether `_written` was not loaded yet

    def connect(self, urls: Sequence[str], joins: bool = False) -> None:
        self._loads = self._loads_of(urls, joins)

    async def write(self, version: int) -> None:
        """Writes the trainer's weights. Raises RuntimeError, also where a server serves a later version."""
        await asyncio.to_thread(self._connected.check_versions, version_of(version, self._life))
        self._written, self._new = await self._write_version(version), True

    async def load(self, version: int) -> PublishReport:
        """Lets the servers load `version`. The first report of a version has the seconds of writing it too. Raises
        RuntimeError naming a server and what all serve, and for another version than the one written last."""
        written, loads, began = self._written, self._connected, time.perf_counter()
        path = self._directory(written, version)
        assert written is not None
        sent = await asyncio.to_thread(loads.load, path, version_of(version, self._life), written.bytes)
        await asyncio.to_thread(loads.keep_only, path)
        seconds, self._new = time.perf_counter() - began + self._new * written.seconds, False
        return PublishReport(
            version=version,
            bytes=sent.bytes,
            seconds=seconds,
            pause_seconds=sent.pause_seconds,
            checksums=sent.checksums,
            failed=sent.failed,
            whole_bytes=written.whole_bytes,
            triton=written.triton,
            decoding=sent.decoding,
        )

    async def publish(self, version: int) -> PublishReport:
        """Writes the version, unless it was the last one written, and lets the servers load it."""
        if self._written is None or self._written.version != version:
            await self.write(version)
        return await self.load(version)

    @staticmethod
    def _directory(written: PublishReport | None, version: int) -> Path:
        if written is None or written.directory is None or written.version != version:
            last = "none" if written is None else f"version {written.version}"
            raise RuntimeError(f"servers must load version {version}, but {last} was written last")
        return written.directory

    @property
    def _connected(self) -> DirectoryLoads:
        if self._loads is None:
            raise RuntimeError("publication before `connect`")
        return self._loads
