"""Bytes that a run's stages will write, by directory, checked against the free space of the disks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from miles_like.config.run import RunConfig
from miles_like.config.sections.loop import CheckpointConfig
from miles_like.nodes.probe import bytes_under
from miles_like.pipeline.stages import Stage
from miles_like.staging.stage_files import pieces_of

_GIB = 1 << 30
# size of a checkpoint over that of BF16 weights: BF16 weights, FP32 masters and two FP32 moments
_CHECKPOINT = 7
_FILE = 1 << 30  # a data file of the shards has at most this many bytes, unless it holds one larger tensor
# of a need: the disk of the machine that starts the run; each node's; that of a node which does not see that machine's
On = Literal["here", "nodes", "apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeed:
    """Bytes that a stage will write below a directory."""

    stage: str
    directory: Path
    bytes: int  # unless `on` is "here", of the node with most
    on: On = "here"
    by_node: tuple[int, ...] = ()  # bytes of each node, unless `on` is "here"

    def of_node(self, node: int, held: int) -> DiskNeed:
        """The need of node number `node`, which has `held` bytes of the stage's output already; 0 bytes for a node that
        the run does not use."""
        return replace(self, bytes=max(0, self.by_node[node] - held) if node < len(self.by_node) else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes that a run writes from the start: by stage to the driver's file system, and to each node's own disk."""

    shared: Mapping[str, int]
    by_node: tuple[int, ...]  # what each node loads; empty without cluster.stage_dir


def stage_bytes(config: RunConfig, stages: Sequence[Stage]) -> StageBytes | None:
    """None where sizes are known only after the fetch stage."""
    by_name = {s.name: s for s in stages}
    bf16, fetched, nodes = by_name["convert"].size, by_name["fetch"].size, by_name["stage"].by_node
    if bf16 is None or fetched is None or nodes is None:
        return None
    served = max((n.served for n in nodes), default=0)
    made = 2 * bf16 if config.model.make is not None else 0  # from BF16 weights and shards
    again = 0 if served == fetched else served  # encoded into the cache before it is copied
    local = config.cluster.stage_dir is not None
    trained = 0 if config.lora.rank else 1 + config.algorithm.has_critic
    shared = {
        "fetch": fetched + made + by_name["fetch"].removed,
        "dequantize": 0 if fetched == bf16 or not by_name["dequantize"].size else bf16,
        "convert": bf16,
        "stage": again + (0 if local else served + bf16),
        "train": trained * checkpoint_size(bf16) * saved_checkpoints(config.checkpoint, config.train.steps),
    }
    return StageBytes(shared=shared, by_node=_loaded(by_name["stage"], bf16) if local else ())


def disk_needs(
    config: RunConfig, stages: Sequence[Stage], to_do: Sequence[str], *, joins_cluster: bool = False
) -> list[DiskNeed]:
    """The needs of the stages that will run; empty where sizes are known only after the fetch stage. joins_cluster: the
    nodes may have separate disks."""
    if (written := stage_bytes(config, stages)) is None:
        return []
    by_name, out = {s.name: s for s in stages}, list[DiskNeed]()
    for name, nbytes in written.shared.items():
        if name in to_do and nbytes > 0:
            where = by_name[name].directory
            left = nbytes - bytes_under(where)  # existing files are kept or replaced
            out.append(DiskNeed(stage=name, directory=where, bytes=max(left, 0)))
    return [*out, *_on_nodes(config, by_name["convert"], by_name["stage"], to_do, joins_cluster=joins_cluster)]


def _on_nodes(
    config: RunConfig, convert: Stage, stage: Stage, to_do: Sequence[str], *, joins_cluster: bool
) -> list[DiskNeed]:
    """On the nodes' own disks: what each loads, and what a node that does not see the cache converts and keeps."""
    bf16, c = convert.size, config.cluster
    assert bf16 is not None
    local = None if c.stage_dir is None else Path(c.stage_dir)
    out = []
    if "convert" in to_do and joins_cluster and c.nodes > 1:
        share = min(bf16, -(-bf16 // c.nodes) + config.convert.workers * _FILE)
        where = pieces_of(convert.directory / "data", local)
        out.append(DiskNeed(stage="convert", directory=where, bytes=share, on="apart", by_node=(share,) * c.nodes))
    loads = _loaded(stage, bf16)
    on: On = "apart" if local is None else "nodes"
    if "stage" in to_do and max(loads) > 0 and (on == "nodes" or joins_cluster):
        where = stage.directory if local is None else local / stage.directory.name
        out.append(DiskNeed(stage="stage", directory=where, bytes=max(loads), on=on, by_node=loads))
    return out


def checkpoint_size(bf16: int) -> int:
    """Bytes of a checkpoint of a model with `bf16` bytes of BF16 weights."""
    return _CHECKPOINT * bf16


def saved_checkpoints(checkpoint: CheckpointConfig, steps: int) -> int:
    """The most checkpoints of a run that are on disk at a time, with the one being written."""
    every = checkpoint.every
    saves = 1 + (steps - 1) // every if every else 1
    kept = checkpoint.keep + (1 if checkpoint.keep_best else 0)
    if checkpoint.keep_every and every:
        kept += steps // math.lcm(every, checkpoint.keep_every)
    return min(saves, kept + 1)


def _loaded(stage: Stage, bf16: int) -> tuple[int, ...]:
    """Bytes that each node loads."""
    assert stage.by_node is not None
    return tuple(n.served + _whole_files(n.shards, bf16) for n in stage.by_node)


def _whole_files(read: int, bf16: int) -> int:
    """Bytes of the data files that hold `read` bytes which ranks read: files at the border hold tensors of others."""
    return min(bf16, read + read // 8 + _FILE) if read else 0


def check_disks(needs: Sequence[DiskNeed], disks: Callable[[Path], tuple[int, int]], where: str = "") -> None:
    """Raises ValueError for the first file system that cannot hold the sum of what stages will write to it.

    disks: directory -> (file system, free bytes). where: prefix of the message.
    """
    by_device: dict[int, list[DiskNeed]] = {}
    free: dict[int, int] = {}
    for n in needs:
        device, free_bytes = disks(n.directory)
        by_device.setdefault(device, []).append(n)
        free[device] = free_bytes
    for device, of_device in by_device.items():
        total = sum(n.bytes for n in of_device)
        if total > free[device]:
            parts = ", ".join(f"{n.stage} {_gib(n.bytes)}" for n in of_device)
            raise ValueError(
                f"{where}the file system of {of_device[0].directory} has {_gib(free[device])} GiB free, but the "
                f"stages will write {_gib(total)} GiB to it ({parts}): free some space, or choose a larger disk "
                "with --cache-dir, --run-dir or cluster.stage_dir"
            )


def check_directories(directories: Sequence[Path]) -> None:
    """Raises ValueError for the first that cannot be made or written."""
    for directory in directories:
        there = next(p for p in (directory.absolute(), *directory.absolute().parents) if os.path.lexists(p))
        if not there.is_dir():
            raise ValueError(
                f"{directory} cannot be created, because {there} is not a directory: choose another --run-dir "
                "or --cache-dir"
            )
        if not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(
                f"{directory} cannot be written: no permission in {there}: choose another --run-dir or --cache-dir"
            )


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.1f}" if nbytes >= _GIB // 10 else f"{nbytes / _GIB:,.4f}"
