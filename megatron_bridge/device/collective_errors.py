"""Raise one rank's error on every rank. An error on a single rank must end the call everywhere, or the other ranks wait
in their next collective until its timeout.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_LOST_PEER = re.compile(r"connection (was )?(closed|reset|refused)|broken pipe|remote process exited", re.IGNORECASE)
_SOURCE_LINE = re.compile(r"\[?\S+\.(cc|cpp|cu|h|hpp):\d+\]?:? *")  # that a library puts before its message


def first_line(error: BaseException) -> str:
    """The first line of an error's message without lines of a library's source, or its type if the message is empty. A
    collective that lost a peer is one sentence, for gloo and NCCL word it in several ways, one by race."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    if _SOURCE_LINE.search(lines[0]) and _LOST_PEER.search(lines[0]):
        return (
            "another rank's connection was lost, because that rank was killed or ran out of memory: see the ranks' logs"
        )
    return _SOURCE_LINE.sub("", lines[0])


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """All ranks' values, in rank order, on every rank of the group (None: all ranks). For small picklable objects such
    as a string or a list of names. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_after(value: Any, meet: Callable[[], None]) -> list[Any]:
    """`gather_objects` of a value that is computed outside of the ranks, such as by reading a disk: the collective is
    opened when the last rank has its value. meet: `StoreSignals.meet`. Collective."""
    meet()
    return gather_objects(value)


def raise_on_every_rank(error: ValueError | None, device: torch.device) -> None:
    """Raise the lowest failing rank's ValueError on every rank, if any rank has one. Collective over all ranks."""
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)  # without an error this is the only cost
    if not int(failed):
        return
    for rank, message in enumerate(gather_objects(None if error is None else str(error))):
        if message is not None:
            raise ValueError(f"rank {rank}: {message}") from error


def check_equal(what: str, number: int, device: torch.device, *, remedy: str) -> None:
    """Raise ValueError on every rank unless `number` is the same on all. Collective over all ranks."""
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, least = int(ends[0]), -int(ends[1])
    if most != least:
        raise ValueError(f"ranks have between {least} and {most} {what}: {remedy}")
