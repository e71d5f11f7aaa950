"""How the process that decides calls a rollout worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class WorkerEnded(RuntimeError):
    """The process of a rollout worker has ended, or its node has."""


class SentLostError(RuntimeError):
    """A value that a worker was to get is lost."""


class Link(Protocol):
    """How the calls reach a worker, which may begin them in another order."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """The worker's answer, or what it raised. Raises WorkerEnded."""

    def send(self, method: str, *arguments: Any) -> None:
        """Without an answer."""

    async def exchange(
        self, method: str, *arguments: Any, sent: Sequence[Any] = (), count: int = 0
    ) -> tuple[Any, Sequence[Any]]:
        """A method that gets values of tokens and gives some: its answer, and references to `count` parcels of what it
        gives. sent: references to parcels of what it gets. Raises as `call`, and SentLostError."""

    def end(self) -> None:
        """Ends the process."""
