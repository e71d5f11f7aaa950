"""Process groups through which publishers send weights to this server (`rollout/wire/groups.py`)."""

from __future__ import annotations

import ipaddress
import threading
from datetime import timedelta

import torch
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]

from miles_like.types import NamedTensor
from rollout.wire.control import DestroyGroup, InitGroup, UpdateFromDistributed
from rollout.wire.flat import FLATTENED, dtype_of, flat_bytes, layout_of, separate
from rollout.wire.groups import join_group, leave_group

_GROUPS = 128  # at the same time, one for each source of a publisher; for a further one the first is left
_CONNECT_S = 20.0  # to the store of a group
_LIMIT_S = 600.0  # on the join, and on one broadcast


class UpdateGroups:
    """The groups that this server is a member of. Methods block; any thread may call them. All raise
    ValueError."""

    def __init__(self) -> None:
        self._groups: dict[str, ProcessGroup] = {}
        self._busy = threading.Lock()  # one join or broadcast at a time

    def join(self, request: InitGroup, client: str) -> None:
        """Join a group whose store is at the address of the client that asks: no client makes this server connect to
        another host. client: its address."""
        if request.backend != "gloo":
            raise ValueError(f"backend = {request.backend!r}: this server runs on CPU, expected 'gloo'")
        if not same_host(request.master_address, client):
            raise ValueError(
                f"master_address = {request.master_address!r} is not the address of this client, {client}: the "
                "group's store must be on the machine that sends the request"
            )
        if request.group_name in self._groups:
            raise ValueError(
                f"this server is already a member of group {request.group_name!r}: destroy the group first"
            )
        with Exclusive(self._busy):
            while len(self._groups) >= _GROUPS:  # of publishers that have ended without leaving theirs
                leave_group(self._groups.pop(next(iter(self._groups))))
            try:
                store = TCPStore(
                    request.master_address, request.master_port, None, False, timedelta(seconds=_CONNECT_S), False
                )
                store.set_timeout(timedelta(seconds=_LIMIT_S))
                self._groups[request.group_name] = join_group(
                    store,
                    name=request.group_name,
                    rank=request.rank_offset,
                    size=request.world_size,
                    backend=request.backend,
                    timeout_s=_LIMIT_S,
                )
            except (RuntimeError, ValueError) as e:
                raise ValueError(f"Failed to initialize custom process group: {first_line(e)}") from None

    def receive(self, request: UpdateFromDistributed, most: int) -> list[NamedTensor]:
        """The tensors of one broadcast. most: bytes that are received at once."""
        names, dtypes, shapes = request.names, request.dtypes, request.shapes
        if request.load_format != FLATTENED or not len(names) == len(dtypes) == len(shapes):
            raise ValueError(
                f'this server only accepts whole buckets: send load_format "{FLATTENED}", and as many dtypes and '
                f"shapes as names ({len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes)"
            )
        layout = layout_of(zip(names, map(dtype_of, dtypes), shapes, strict=True))
        if (nbytes := flat_bytes(layout)) > most:
            raise ValueError(
                f"the tensors of one broadcast have {nbytes:,} bytes, but this server accepts {most:,} at once: "
                "send less, or start it with a larger --bucket-bytes"
            )
        if (group := self._groups.get(request.group_name)) is None:
            raise ValueError(f"this server is not a member of group {request.group_name!r}: join it first")
        bucket = torch.empty(nbytes, dtype=torch.uint8)
        with Exclusive(self._busy):
            try:
                group.broadcast(bucket, 0).wait()
            except RuntimeError as e:
                leave_group(self._groups.pop(request.group_name))
                raise ValueError(f"Failed to receive weights: {first_line(e)}") from None
        return list(separate(bucket, layout))

    def leave(self, request: DestroyGroup) -> None:
        if (group := self._groups.pop(request.group_name, None)) is None:
            raise ValueError("The group to be destroyed does not exist.")
        leave_group(group)


class Exclusive:
    """A lock that is refused while another thread has it."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ValueError("this server is already joining a group or receiving a broadcast: try again later")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def same_host(master: str, client: str) -> bool:
    try:
        a, b = ipaddress.ip_address(master), ipaddress.ip_address(client)
    except ValueError:
        return False
    return a == b or (a.is_loopback and b.is_loopback)


def is_loopback(client: str) -> bool:
    """Whether a client's address is loopback."""
    return same_host("127.0.0.1", client)


def first_line(e: Exception) -> str:
    return str(e).partition("\n")[0]
