"""How the process that decides calls a rollout worker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class WorkerEnded(RuntimeError):
    """The process of a rollout worker has ended, or its node has."""


class SentLostError(RuntimeError):
    """A value that a worker was to get is lost."""


class StoreFullError(RuntimeError):
    """The object store of a worker's node has no room for a value, and cannot spill others."""


class Answered(NamedTuple):
    """The answer to an exchange of values. held: bytes that are held now of each group which it was about."""

    answer: Any
    held: Mapping[int, int]


class Link(Protocol):
    """How the calls reach a worker, which may begin them in another order."""

    async def call(self, method: str, *arguments: Any) -> Any:
        """The worker's answer, or what it raised. Raises WorkerEnded."""

    def send(self, method: str, *arguments: Any) -> None:
        """Without an answer."""

    async def exchange(
        self, method: str, *arguments: Any, keys: Sequence[int] = (), sent: Sequence[Any] = (), count: int = 0
    ) -> tuple[Answered, Sequence[Any]]:
        """`RolloutWorker.exchange`: the answer, and references to `count` parcels of what the method gives. sent:
        references to parcels of what it gets. Raises as `call`, SentLostError, and StoreFullError where what the
        method gives has no room."""

    def end(self) -> None:
        """Ends the process."""
