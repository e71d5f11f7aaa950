"""The exchange of several ranks of one server: a gloo group on the loopback interface.

The ranks meet through a file in a private directory, so that nothing listens but gloo's own connections, on 127.0.0.1.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LOOPBACK = "127.0.0.1"


class RankLost(RuntimeError):
    """A rank of this server has ended, or does not answer."""


class GlooExchange:
    """The `Exchange` of `size` ranks. Every method raises RankLost when another rank has ended, or has not called it
    within `limit_s`."""

    def __init__(self, meeting: Path, rank: int, size: int, *, limit_s: float) -> None:
        """meeting: a file that does not exist yet, in a directory of this server. Returns when all ranks are there."""
        self.rank, self.size = rank, size
        self.explain: Callable[[str], str] = str  # an error of gloo -> one that names the rank
        limit = timedelta(seconds=limit_s)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = limit
        store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]
        store.set_timeout(limit)
        try:
            self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)
        except RuntimeError as e:
            raise RankLost(f"the ranks of this server did not meet within {limit_s:g} s ({_first_line(e)})") from e

    def gathered(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(self.size, *x.shape, dtype=x.dtype)
        self._wait(lambda: self._group._allgather_base(_bytes(out), _bytes(x)))
        return out

    def gathered_first(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty(self.size if self.rank == 0 else 0, *x.shape, dtype=x.dtype)
        lists = [[_bytes(part) for part in out.unbind()]] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._wait(lambda: self._group.gather(lists, [_bytes(x)], options))
        return out if self.rank == 0 else x[None]

    def send(self, x: Tensor, to: int) -> None:
        """Sends bytes to a rank that receives them."""
        self._wait(lambda: self._group.send([_bytes(x.contiguous())], to, 0))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fills x, which is contiguous, with the bytes that rank `source` sends."""
        self._wait(lambda: self._group.recv([_bytes(x)], source, 0))
        return x

    def _wait(self, start: Callable[[], dist.Work]) -> None:
        try:
            start().wait()
        except RuntimeError as e:
            raise RankLost(self.explain(_first_line(e))) from e


def _bytes(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, one-dimensional: gloo knows few dtypes."""
    return x.view(-1).view(torch.uint8) if x.dtype is not torch.uint8 else x.view(-1)


def _first_line(e: Exception) -> str:
    return (str(e).splitlines() or [""])[0][:300]
