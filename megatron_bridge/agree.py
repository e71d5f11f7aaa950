"""One rank's words, heard by all: an error that only one rank sees must end the call on every rank, or the others wait
in their next collective until its time limit.

Letters: n ranks, B bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_text(text: str, device: torch.device) -> list[str]:
    """Every rank's text, in rank order, on every rank. Collective over all ranks."""
    data = text.encode()
    size = torch.tensor([len(data)], device=device)
    dist.all_reduce(size, dist.ReduceOp.MAX)
    if not int(size):
        return [""] * dist.get_world_size()
    mine = torch.zeros(int(size), dtype=torch.uint8, device=device)  # [B]
    mine[: len(data)] = torch.tensor(list(data), dtype=torch.uint8, device=device)
    every: list[Tensor] = [torch.empty_like(mine) for _ in range(dist.get_world_size())]  # [n][B]
    dist.all_gather(every, mine)
    return [bytes(x.tolist()).rstrip(b"\0").decode() for x in every]


def raise_together(error: ValueError | None, device: torch.device) -> None:
    """Raises the first rank's ValueError on every rank, when any has one. Collective over all ranks."""
    for rank, said in enumerate(gather_text(str(error) if error else "", device)):
        if said:
            raise ValueError(f"rank {rank}: {said}") from error


def check_equal(what: str, number: int, device: torch.device, *, remedy: str) -> None:
    """Raises ValueError on every rank unless `number` is the same on all. Collective over all ranks."""
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, least = int(ends[0]), -int(ends[1])
    if most != least:
        raise ValueError(f"ranks have between {least} and {most} {what}: {remedy}")


def first_said(texts: Sequence[str]) -> str:
    """The first text that is not empty, or an empty one."""
    return next((text for text in texts if text), "")
