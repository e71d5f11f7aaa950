"""Temporary replacements of functions while a rank is executed, each with a name that the rank's record lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_bridge.device.shims import owner_of


@dataclass(frozen=True, slots=True)
class Substitute:
    """`owner.name` is replaced by `make(stock)`. owner: import path of a module, or "module:Class"."""

    owner: str
    name: str
    reason: str
    make: Callable[[Any], Any]

    @property
    def label(self) -> str:
        """The replacement's name in the record."""
        return f"{self.owner.replace(':', '.')}.{self.name}: {self.reason}"


@contextmanager
def substituted(table: Iterable[Substitute]) -> Iterator[list[str]]:
    """Context in which the replacements of `table` are installed; yields their labels. Raises AttributeError for a
    target that does not exist."""
    undo: list[tuple[Any, str, Any, bool]] = []
    labels = []
    try:
        for entry in table:
            owner = owner_of(entry.owner)
            stock = getattr(owner, entry.name)
            own = entry.name in vars(owner)
            undo.append((owner, entry.name, vars(owner)[entry.name] if own else None, own))
            setattr(owner, entry.name, entry.make(stock))
            labels.append(entry.label)
        yield labels
    finally:
        for owner, name, value, own in reversed(undo):
            if own:
                setattr(owner, name, value)
            else:
                delattr(owner, name)
