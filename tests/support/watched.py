"""A fleet as the checks of a run see it: it notes what they do with its servers, and starts none."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from miles_like.types import PublishReport, ServerFault
from rollout.episodes.serving import Serving


class Watched:
    """As alignment.server_checks.Fleet."""

    needs_trainer = True

    def __init__(self, urls: Sequence[str]) -> None:
        self.targets: set[str] = set(urls)
        self.serving = Serving(urls, limit_s=60.0)
        self.log: list[Any] = []
        self.joins: list[PublishReport] = []  # the first reports; clean ones then

    async def prepare(self) -> None:
        self.log.append("prepare")

    async def publish(self, version: int, urls: Collection[str]) -> PublishReport:
        self.log.append(("publish", sorted(urls)))
        return PublishReport(version=version, bytes=1, seconds=0.5, pause_seconds=0.25)

    async def join(self, version: int, urls: Collection[str]) -> PublishReport:
        self.log.append(("join", sorted(urls)))
        clean = PublishReport(version=version, bytes=1, seconds=0.5, pause_seconds=0.25)
        return self.joins.pop(0) if self.joins else clean

    def leave_out(self, faults: Sequence[ServerFault]) -> None:
        self._note("left out", faults)

    def fail(self, faults: Sequence[ServerFault]) -> None:
        self._note("failed", faults)

    def _note(self, what: str, faults: Sequence[ServerFault]) -> None:
        if faults:
            self.log.append((what, sorted(fault.url for fault in faults)))

    def verified(self, urls: Collection[str], version: int) -> None:
        self.log.append(("verified", sorted(urls)))

    async def settled(self) -> None:
        self.log.append("settled")

    async def close(self) -> None:
        self.log.append("closed")

    def metrics(self) -> Mapping[str, float]:
        return {"rollout/restarts": 0.0}
