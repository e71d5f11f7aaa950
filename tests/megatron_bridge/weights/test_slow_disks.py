"""Law: while a rank waits for a disk, or for the batch that is sent to it, no other rank is in a collective.

Why it must hold: the time limit of a collective is that of ranks which compute. A rank whose file system hangs for an
hour, or rank 0 alone at a directory of a terabyte to remove, would end the others by it, with an error about the
network. Two ranks note what they are in; at each point one of them waits until the other has come to rest, and notes
where. Not covered: the writing of shards itself, during which ranks that are done exchange one word every fifth of a
second; reading config.json and importing modules, which happens before the ranks meet.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.support import toy
from tests.support.spawn import run_ranks

RESTS_S = 0.3  # a rank that has been in one call for so long waits there
COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "barrier", "broadcast"),
    *("broadcast_object_list", "gather_object", "reduce_scatter_tensor", "scatter_object_list"),
)
AT_SAVE = ("prepare", "common file", "look at the directory", "complete")
AT_LOAD = ("checksums", "common file read", "metadata", "common state", "shards")


class Watch:
    """Notes what this rank is in, and at a slow point of this rank what the other is in."""

    def __init__(self, where: Path, rank: int, meets: Any) -> None:
        self.file, self.other = where / f"in_{rank}", where / f"in_{1 - rank}"
        self.numbers, self.found = itertools.count(), list[tuple[str, str]]()
        self.enter("nothing")
        for name in COLLECTIVES:
            setattr(dist, name, self.noted(f"collective {name}", getattr(dist, name)))
        meets.meet = self.noted("meeting", meets.meet)

    def enter(self, what: str) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(f"{next(self.numbers)} {what}")
        new.rename(self.file)

    def noted(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **more: Any) -> Any:
            self.enter(what)
            try:
                return call(*args, **more)
            finally:
                self.enter("nothing")

        return watched

    def wait(self, point: str) -> None:
        """As for a disk: until the other rank waits too."""
        deadline, since, seen = time.monotonic() + 60, time.monotonic(), ""
        while seen.endswith("nothing") or time.monotonic() < since + RESTS_S:
            assert time.monotonic() < deadline, f"{point}: the other rank went on"
            if (now := self.other.read_text() if self.other.exists() else "nothing") != seen:
                seen, since = now, time.monotonic()
            time.sleep(0.01)
        self.found.append((point, seen.partition(" ")[2]))

    def slow(self, target: Any, name: str, point: str) -> None:
        """The function waits before it does its work, the first time."""
        stock, left = getattr(target, name), [True]

        def waits(*args: Any, **more: Any) -> Any:
            if left.pop() if left else False:
                self.wait(point)
            return stock(*args, **more)

        setattr(target, name, staticmethod(waits) if isinstance(vars(target).get(name), staticmethod) else waits)


def _ranks(rank: int, world: int, port: int, hf: str, where: Path) -> list[tuple[str, str]]:
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from megatron_bridge.convert.directory.torch_dist import TorchDist
    from megatron_bridge.weights import checkpoint, checkpoint_sums
    from megatron_bridge.weights.checkpoint_writer import CheckpointSave
    from miles_like.cluster.rank import Rank

    with toy.trainer(toy.config(hf, dp=2, ep=2, mode="off"), rank, world, port) as t:
        watch = Watch(where, rank, t.signals)
        own: Any = Rank()
        own.rank, own.trainer = rank, t
        rows, tokens = toy.grid(toy.samples(4, layers=()), dp=2, micros=1)
        if rank == 1:
            watch.wait("batch of a step")
        own.train([tokens], 1, [1], rows[rank], [m.routing for m in rows[rank]])
        if rank == 1:
            watch.wait("batch to score")
        own.logprobs(rows[rank], None, False, True)

        if rank == 0:
            watch.slow(CheckpointSave, "_prepare", "prepare")
            watch.slow(CheckpointSave, "_write_common", "common file")
            watch.slow(CheckpointSave, "_complete", "complete")
        else:
            watch.slow(FileSystemWriter, "prepare_local_plan", "look at the directory")
        own.save(where / "saved", False)
        if rank == 1:
            watch.slow(checkpoint_sums, "checksum", "checksums")
            watch.slow(checkpoint, "_common", "common file read")
            watch.slow(TorchDist, "__init__", "metadata")
            watch.slow(TorchCommonLoadStrategy, "load_common", "common state")
            watch.slow(TorchDist, "read", "shards")
        own.load(where / "saved")
        if rank == 1:
            watch.slow(TorchDist, "__init__", "metadata of weights")
            watch.slow(TorchDist, "read", "shards of weights")
        t.load_weights(where / "saved")
        return watch.found


def test_a_rank_at_its_disk_has_no_other_in_a_collective(tmp_path: Path) -> None:
    first, second = run_ranks(_ranks, 2, toy.hf_dir(tmp_path / "hf"), tmp_path)
    points = ["batch of a step", "batch to score", *AT_SAVE, *AT_LOAD, "metadata of weights", "shards of weights"]
    assert sorted(point for point, _ in first + second) == sorted(points)
    assert {(point, other) for point, other in first + second if other != "meeting"} == set()
