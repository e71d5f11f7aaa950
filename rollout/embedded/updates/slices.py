"""A rank's part of a publication in which trainer ranks send each rank of a server its slices
(`rollout/wire/reshard/requests.py`)."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]

from rollout.embedded.updates.groups import Exclusive, first_line
from rollout.wire.groups import join_group, leave_group
from rollout.wire.reshard.messages import MessageHash, byte_rows, packed, unpack
from rollout.wire.reshard.requests import Segment

_CONNECT_S = 20.0  # to the store of a group


class HeldRows(NamedTuple):
    """The rows of a stored tensor that a rank holds."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of these rows
    first: int  # number of the first one in the whole tensor


class Message(NamedTuple):
    source: int  # rank of the group
    segments: tuple[Segment, ...]


class RankPlan(NamedTuple):
    """What a rank gets. It can be pickled."""

    held: Mapping[int, HeldRows]  # by the places of the tensors in the plan
    messages: Mapping[int, tuple[Message, ...]]  # by piece


class Meeting(NamedTuple):
    """Where the members of a group meet."""

    name: str
    address: str
    port: int
    rank: int
    size: int
    timeout_s: float

    def of(self, rank: int) -> Meeting:
        return self._replace(rank=rank)


def _without_source(line: str) -> str:
    """Without the line of gloo's source that it begins with."""
    return re.sub(r"^\[\S+:\d+\] ?", "", line)


class SliceReceiver:
    """Methods block; one thread at a time may join, receive or leave, another may take what has been received. All
    raise ValueError."""

    def __init__(self) -> None:
        self._plan = RankPlan({}, {})
        self._group: ProcessGroup | None = None
        self._name = ""
        self._ready: dict[str, Tensor] = {}  # received, and not taken
        self._busy = threading.Lock()

    def plan(self, plan: RankPlan) -> None:
        """Replaces the plan, and leaves the group that was joined for another plan."""
        with Exclusive(self._busy):
            self._leave()
            self._plan, self._ready = plan, {}

    def join(self, at: Meeting) -> None:
        with Exclusive(self._busy):
            self._leave()
            try:
                store = TCPStore(
                    at.address, at.port, None, False, timedelta(seconds=min(_CONNECT_S, at.timeout_s)), False
                )
                store.set_timeout(timedelta(seconds=at.timeout_s))
                self._group = join_group(
                    store, name=at.name, rank=at.rank, size=at.size, backend="gloo", timeout_s=at.timeout_s
                )
                self._name = at.name
            except (RuntimeError, ValueError) as e:
                raise ValueError(f"the process group for weights was not joined: {first_line(e)}") from None

    def receive(self, name: str, piece: int) -> int:
        """Receives the messages of a piece; returns their bytes. After a failure the group is left."""
        with Exclusive(self._busy):
            if self._group is None or name != self._name:
                raise ValueError(f"this server is not a member of group {name!r}: join it first")
            messages = self._plan.messages.get(piece, ())
            buffers = [torch.empty(sum(s.nbytes for s in m.segments), dtype=torch.uint8) for m in messages]
            source = messages[0].source if messages else 0
            try:
                works = [self._group.recv([b], m.source, 0) for b, m in zip(buffers, messages, strict=True)]
                for message, work in zip(messages, works, strict=True):
                    source = message.source
                    work.wait()
            except RuntimeError as e:
                self._leave()
                raise ValueError(
                    f"trainer rank {source} did not send its part of piece {piece}: {_without_source(first_line(e))}"
                ) from None
            tensors = {s.tensor: self._plan.held[s.tensor] for m in messages for s in m.segments}
            found = {place: torch.empty(held.shape, dtype=held.dtype) for place, held in tensors.items()}
            for buffer, message in zip(buffers, messages, strict=True):
                unpack(buffer, message.segments, partial(self._part, found))
            self._ready = {tensors[place].name: t for place, t in found.items()}
            return sum(b.nbytes for b in buffers)

    def take(self) -> dict[str, Tensor]:
        """The tensors of the piece that was received last, once."""
        ready, self._ready = self._ready, {}
        return ready

    def leave(self, name: str) -> bool:
        """Leave the group `name`, without waiting; returns whether it was joined."""
        if name != self._name:
            return False
        with Exclusive(self._busy):
            self._leave()
        return True

    def hashes(self, stored: Callable[[str], Tensor]) -> dict[str, str]:
        """Trainer rank -> hash of the bytes of its messages, as they are now in the stored tensors of these names."""
        out: dict[int, MessageHash] = {}
        for _, messages in sorted(self._plan.messages.items()):
            tensors = {s.tensor: stored(self._plan.held[s.tensor].name) for m in messages for s in m.segments}
            whole = {place: t.cpu().contiguous() for place, t in tensors.items()}
            for message in messages:
                bytes_of = packed(message.segments, partial(self._part, whole))
                out.setdefault(message.source, MessageHash()).add(bytes_of)
        return {str(source): found.hex for source, found in out.items()}

    def _part(self, tensors: Mapping[int, Tensor], s: Segment) -> Tensor:
        """The bytes of a segment in the rows that are held."""
        row = s.row - self._plan.held[s.tensor].first
        return byte_rows(tensors[s.tensor])[row : row + s.rows, s.byte : s.byte + s.width]

    def _leave(self) -> None:
        group, self._group, self._name = self._group, None, ""
        if group is not None:
            leave_group(group)
