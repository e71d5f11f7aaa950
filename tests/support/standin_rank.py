"""A trainer rank that only tells what came to it, where a Ray worker can import it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from miles_like.types import StepReport
from routing_replay.align import ShardSpec
from tests.support.made_samples import LAYERS

PLACES = {  # of two ranks: (row of the grid, part)
    "DP2": [(0, ShardSpec(layers=LAYERS)), (1, ShardSpec(layers=LAYERS))],
    "TP2": [(0, ShardSpec(layers=LAYERS, multiple=2))] * 2,
    "CP2": [(0, ShardSpec(layers=LAYERS, cp=2, cp_rank=r)) for r in range(2)],
    "PP2": [(0, ShardSpec(layers=(layer,))) for layer in LAYERS],
}


@dataclass(frozen=True)
class FailsToStart:
    """Ranks that cannot be built. how: "dies": rank 0 is killed, and the others have lost its connection before that is
    known. "refuses": the last rank refuses its layout, and the others wait for it. "breaks": the last rank's GPU fails,
    and the others lose its connection."""

    how: str

    def __call__(self, rank: int, world: int, host: str, port: int) -> Any:
        guilty = rank == (0 if self.how == "dies" else world - 1)
        if guilty and self.how == "dies":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        if guilty and self.how == "refuses":
            raise ValueError("layout tp = 3 does not divide 16 heads")
        if guilty:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        time.sleep({"dies": 0, "refuses": 3600, "breaks": 1}[self.how])
        raise RuntimeError("Read error: Connection reset by peer")


def users_function() -> None:
    time.sleep(3600)


@dataclass(frozen=True)
class InCollective:
    """Ranks of one gloo group, whose last rank does not come to the collective in which the others are."""

    def __call__(self, rank: int, world: int, host: str, port: int) -> Any:
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=world)

        class Rank:
            dp_rank, shard_spec = 0, ShardSpec(layers=LAYERS)

            def load_copy(self, name: str, path: Any) -> None:
                if rank == world - 1:
                    users_function()
                dist.all_reduce(torch.ones(1))

        return Rank()


@dataclass(frozen=True)
class Stand:
    """A rank at one of PLACES; its report is what came."""

    where: str

    def __call__(self, rank: int, world: int, host: str, port: int) -> Any:
        dp_rank, part = PLACES[self.where][rank]
        came: list[Any] = []

        class Rank:
            signals = SimpleNamespace(meet=lambda: None)

            def __init__(self) -> None:
                self.dp_rank, self.shard_spec = dp_rank, part

            def train(self, rows: Any, loss_tokens: Any, version: int) -> Any:
                came[:] = [rows]
                return StepReport(version=version, metrics={})

            def logprobs(self, row: Any, weights: str | None, *, candidates: bool = False) -> Any:
                """Half of each label."""
                return [0.5 * m.labels for m in row]

            def evaluate(self, row: Any, loss_tokens: int) -> Any:
                return {}

            def save(self, path: Any, *, asynchronous: bool) -> Any:
                """The last rank dies, and the others hear of it first."""
                if rank == world - 1:
                    time.sleep(0.5)
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("Read error: Connection reset by peer")

            def finish_save(self, *, wait: bool) -> Any:
                return came[0]

        return Rank()
