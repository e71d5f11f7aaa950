"""Raise one rank's error on every rank. An error on a single rank must end the call everywhere, or the other ranks wait
in their next collective until its timeout.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def gather_objects(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """All ranks' values, in rank order, on every rank of the group (None: all ranks). For small picklable objects such
    as a string or a list of names. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


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
