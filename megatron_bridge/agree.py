"""One rank's words, heard by all: an error that only one rank sees must end the call on every rank, or the others wait
in their next collective until its time limit.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def gather(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    """Every rank's value, in rank order, on every rank of the group (None: all ranks). Small objects that pickle, a
    string or a list of names. Collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_together(error: ValueError | None, device: torch.device) -> None:
    """Raises the first rank's ValueError on every rank, when any has one. Collective over all ranks."""
    failed = torch.tensor([error is not None], dtype=torch.int32, device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)  # a step that goes well pays for one number
    if not int(failed):
        return
    for rank, said in enumerate(gather(None if error is None else str(error))):
        if said is not None:
            raise ValueError(f"rank {rank}: {said}") from error


def check_equal(what: str, number: int, device: torch.device, *, remedy: str) -> None:
    """Raises ValueError on every rank unless `number` is the same on all. Collective over all ranks."""
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, least = int(ends[0]), -int(ends[1])
    if most != least:
        raise ValueError(f"ranks have between {least} and {most} {what}: {remedy}")
