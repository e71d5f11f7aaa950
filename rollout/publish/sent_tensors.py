"""Hashes of the weights that the servers have, so that tensors that do not change are sent only once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from miles_like.types import NamedTensor
from rollout.wire.deltas import content_hash


def _module(tensor: NamedTensor) -> str:
    return tensor.name.rpartition(".")[0]


class SentTensors:
    """Hashes of the stored tensors of the last publication that the servers acknowledged.

    A tensor that a configuration freezes (outside of the adapters of LoRA, `optimizer.frozen`, a routing bias without
    updates) has equal bytes in every publication; so has one that no update has moved by a rounding step.
    """

    def __init__(self) -> None:
        self._held: dict[str, bytes] = {}
        self._next: dict[str, bytes] = {}
        self._checksums: dict[str, str] = {}

    def forget(self) -> None:
        """Forget all hashes, so that every tensor is sent again: the state of the servers is unknown."""
        self._held, self._checksums = {}, {}

    def changed(self, encoded: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Tensors of modules that differ from those on the servers; a server gets codes with their scales. Tensors of a
        module must be adjacent; those of one module are in memory at once. Raises ValueError for a duplicate name."""
        self._next = {}
        for _, module in groupby(encoded, _module):
            tensors = list(module)
            hashes = {name: content_hash(tensor.detach().cpu()) for name, tensor in tensors}
            if again := {name for name, _ in tensors if name in self._next}:  # `cut` sees what is sent only
                raise ValueError(f"tensor {min(again)!r} occurs twice in the weights to publish: pass each tensor once")
            if any(self._held.get(name) != found for name, found in hashes.items()):
                yield from tensors
            self._next |= hashes

    @property
    def empty(self) -> bool:
        """Whether the weights of the servers are unknown."""
        return not self._held

    @property
    def seen(self) -> int:
        """Tensors of the stream of this publication so far."""
        return len(self._next)

    def checksums(self, sent: dict[str, str]) -> dict[str, str]:
        """Of all tensors that the servers hold after `sent`."""
        return {name: c for name, c in self._checksums.items() if name in self._next} | sent

    def acknowledge(self, sent: dict[str, str]) -> None:
        """Call when all servers have the publication. sent: the checksums of its tensors."""
        self._checksums, self._held = self.checksums(sent), self._next
