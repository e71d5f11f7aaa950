"""Division of the published weights into requests.

An engine may be able to fuse several tensors of a checkpoint into one parameter only within one load request. `fused`
lists such tensors, a tuple of Hugging Face names for each parameter, from the trainer's family table. It is empty for
engines that copy every tensor to its place on arrival.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from miles_like.types import NamedTensor

Fused = Sequence[Sequence[str]]


def gathered(stream: Iterable[NamedTensor], fused: Fused) -> Iterator[NamedTensor]:
    """The stream with the tensors of each `fused` tuple next to each other, at the position of the last of them.

    It is applied before quantization, so that codes and scales stay together too. Tensors of an incomplete tuple are
    kept in memory. Raises ValueError at the end of the stream if a tuple is incomplete.
    """
    group_of = {name: tuple(names) for names in fused for name in names}
    waiting: dict[tuple[str, ...], dict[str, NamedTensor]] = {}
    for name, tensor in stream:
        group = group_of.get(name)
        if group is None:
            yield NamedTensor(name, tensor)
            continue
        held = waiting.setdefault(group, {})
        if name in held:  # `cut` rejects it as a duplicate
            yield held[name]
        held[name] = NamedTensor(name, tensor)
        if len(held) == len(group):
            del waiting[group]
            yield from (held[n] for n in group)
    for group, held in waiting.items():
        missing = next(n for n in group if n not in held)
        raise ValueError(
            f"the weights to publish have {next(iter(held))} but not {missing}; a rollout engine loads the two "
            "only in one request: publish both"
        )


def cut(stream: Iterable[tuple[str, Any]], bucket_bytes: int, fused: Fused = ()) -> Iterator[list[NamedTensor]]:
    """Non-empty lists of about `bucket_bytes` bytes, in the order of the stream of stored tensors (codes and scales if
    quantized). Raises ValueError for a duplicate name.

    Adjacent tensors of one module stay in one list, so that a server never gets codes without their scales. So do
    tensors of the modules of one `fused` tuple, which `gathered` makes adjacent. A list may therefore exceed
    `bucket_bytes` by the size of one such unit.
    """
    unit_of = {module_of(name): index for index, names in enumerate(fused) for name in names}
    part: list[NamedTensor] = []
    size, seen = 0, set[str]()
    unit: str | int = ""
    for name, tensor in stream:
        if name in seen:
            raise ValueError(f"tensor {name!r} occurs twice in the weights to publish: pass each tensor once")
        seen.add(name)
        module = module_of(name)
        before, unit = unit, unit_of.get(module, module)
        if part and size + tensor.nbytes > bucket_bytes and unit != before:
            yield part
            part, size = [], 0
        part.append(NamedTensor(name, tensor))
        size += tensor.nbytes
    if part:
        yield part


def module_of(name: str) -> str:
    """The module of a stored tensor."""
    return name.rpartition(".")[0]


class HostBytes:
    """Bytes of tensors whose buckets are packed and not loaded by the servers yet.

    Buckets of `hold_bytes` may be held before the servers are paused, the last of which may exceed it; meanwhile one is
    sent and one is packed. A bucket has `bucket_bytes`, or as much as the largest. More is an error of this program and
    an AssertionError, because a process on a host without memory ends without a message.
    """

    def __init__(self, hold_bytes: int, bucket_bytes: int) -> None:
        self._hold_bytes, self._largest = hold_bytes, bucket_bytes
        self.held = self.peak = 0

    @property
    def bound(self) -> int:
        return self._hold_bytes + 3 * self._largest

    def take(self, bucket: int) -> None:
        """bucket: bytes of its tensors."""
        self._largest = max(self._largest, bucket)
        self.held += bucket
        self.peak = max(self.peak, self.held)
        assert self.held <= self.bound, f"a publication holds {self.held} bytes on the host, more than {self.bound}"

    def give(self, bucket: int) -> None:
        """The servers have loaded it."""
        self.held -= bucket
