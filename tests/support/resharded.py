"""Trainer ranks without Megatron: processes that hold shards of known tensors, cut by hand, and publish them."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatron_bridge.device.signals import StoreSignals
from miles_like.types import NamedTensor, WeightRegion
from rollout.publish.publication import PublishTarget
from rollout.publish.reshard.member import Member
from rollout.publish.reshard.publisher import ReshardPublisher
from tests.support.spawn import free_port, warm_context
from tests.support.tiny_models import random_tensors

BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
WHOLE = ("gate.weight", "q_a_proj.weight", "kv_a_proj_with_mqa.weight")
PATIENCE_S = 120.0


class HandShards:
    """What rank `rank` of `ranks` holds of whole tensors. layout: "tp", every matrix is divided; "ep", experts are, and
    of the rest every rank has a copy; "stages", layers are, the first rank has all others."""

    def __init__(self, tensors: Mapping[str, Tensor], layout: str, rank: int, ranks: int) -> None:
        self.tensors = tensors
        self.names = tuple(tensors)
        self.regions = [
            WeightRegion(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), rows, columns, stage)
            for name, t in tensors.items()
            for rows, columns, stage in _held(name, t, layout, rank, ranks)
        ]
        self.gathers: list[str] = []

    def values(self, numbers: Sequence[int]) -> Iterator[Tensor]:
        for n in numbers:
            name, _, _, (a, b), (c, d), _ = self.regions[n]
            t = self.tensors[name]
            yield t.view(len(t), -1)[a:b, c:d]

    def gathered(self, names: Container[str]) -> Iterator[NamedTensor]:
        for name, t in self.tensors.items():
            if name in names:
                self.gathers.append(name)
                yield NamedTensor(name, t)


def _held(
    name: str, t: Tensor, layout: str, rank: int, ranks: int
) -> Iterator[tuple[tuple[int, int], tuple[int, int], int]]:
    rows, columns, parts = len(t), t.shape[1] if t.dim() > 1 else 1, name.split(".")
    whole = (0, rows), (0, columns)
    if layout == "ep":
        if "experts" not in parts or int(parts[parts.index("experts") + 1]) % ranks == rank:
            yield *whole, 0
    elif layout == "stages":
        stage = int(parts[2]) % ranks if parts[1] == "layers" else 0
        if stage == rank:
            yield *whole, stage
    elif t.dim() == 1 or name.endswith(WHOLE):
        yield *whole, 0
    elif name.endswith(BY_COLUMNS):
        yield (0, rows), (columns * rank // ranks, columns * (rank + 1) // ranks), 0
    else:
        yield (rows * rank // ranks, rows * (rank + 1) // ranks), (0, columns), 0


@dataclass
class Weights:
    """ShardedWeights of one publication."""

    shards: HandShards
    signals: StoreSignals
    number: int

    def __iter__(self) -> Iterator[NamedTensor]:
        raise AssertionError("the whole stream is not asked for")

    def gathered(self, names: Container[str]) -> Iterator[NamedTensor]:
        return self.shards.gathered(names)


@dataclass
class Fault:
    """In the middle of a publication, when this rank sends `piece`: a signal to a process, or to this one (pid 0), or
    a value that is not finite in one of its shards."""

    rank: int
    piece: int = 1
    pid: int = -1
    number: int = signal.SIGKILL
    spoils: str = ""  # name of a tensor


@dataclass
class Result:
    error: str = ""
    bytes: int = 0
    seconds: float = 0.0
    pause_seconds: float = 0.0
    failed: list[str] = field(default_factory=list)
    checksums: Any = ()
    received: list[list[int]] = field(default_factory=list)
    gathers: list[str] = field(default_factory=list)
    pieces: int = 0


class _TrainerRank:
    """In its process."""

    def __init__(self, hf: dict[str, Any], layout: str, rank: int, ranks: int, port: int) -> None:
        limit = timedelta(seconds=PATIENCE_S)
        self.hf, self.layout, self.rank, self.ranks, self.number = hf, layout, rank, ranks, 0
        self.signals = StoreSignals(TCPStore("127.0.0.1", port, ranks, rank == 0, limit), ranks)
        self.publisher: Any = None

    def connect(self, target: PublishTarget) -> None:
        ranks = self.ranks
        self.publisher = (
            Member(target, rank=self.rank, ranks=ranks) if self.rank else ReshardPublisher(target, ranks=ranks)
        )

    def train(self, hf: dict[str, Any]) -> None:
        self.hf = hf

    def publish(self, version: int, seed: int, fault: Fault | None) -> Result:
        self.number += 1
        tensors = random_tensors(self.hf, seed)
        shards = HandShards(tensors, self.layout, self.rank, self.ranks)
        if fault is not None and fault.rank == self.rank:
            _plant(shards, fault)
        found = Result()
        try:
            report = self.publisher.publish(Weights(shards, self.signals, self.number), version=version)
            found.bytes, found.failed = report.bytes, [f.url for f in report.failed]
            found.seconds, found.pause_seconds = report.seconds, report.pause_seconds
            found.checksums = report.checksums
        except (RuntimeError, ValueError, OSError) as e:
            found.error = str(e)
        found.gathers = shards.gathers
        if self.rank == 0:
            found.received = [list(ranks) for ranks in self.publisher._received]
            found.pieces = self.publisher._plan.pieces if self.publisher._joint else 0
        return found


def _plant(shards: HandShards, fault: Fault) -> None:
    """Where the shards are read for a piece: the publisher has sent the piece before the one before."""
    values, calls = shards.values, [0]

    def read(numbers: Sequence[int]) -> Iterator[Tensor]:
        calls[0] += 1
        if calls[0] == fault.piece + 1:
            if fault.spoils:
                shards.tensors[fault.spoils].fill_(float("nan"))
            else:
                os.kill(fault.pid or os.getpid(), fault.number)
        yield from values(numbers)

    shards.values = read  # type: ignore[method-assign]


def _serve(line: Connection, *given: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    own = _TrainerRank(*given)
    while True:
        try:
            method, arguments = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        line.send_bytes(pickle.dumps(getattr(own, method)(*arguments)))


class TrainerRanks:
    """Processes of one trainer."""

    def __init__(self, hf: dict[str, Any], layout: str, ranks: int) -> None:
        self.lines, self.processes, port = [], [], free_port()
        for rank in range(ranks):
            line, theirs = warm_context().Pipe()
            process = warm_context().Process(target=_serve, args=(theirs, hf, layout, rank, ranks, port), daemon=True)
            process.start()
            theirs.close()
            self.lines.append(line)
            self.processes.append(process)

    def connect(self, target: PublishTarget) -> None:
        self._all("connect", target)

    def train(self, hf: dict[str, Any]) -> None:
        """Publish another model, by publishers that are connected after this."""
        self._all("train", hf)

    def publish(self, version: int, seed: int, fault: Fault | None = None) -> Result:
        """What rank 0 finds; `gathers` are those of all ranks."""
        results = self._all("publish", version, seed, fault)
        assert isinstance(results[0], Result)
        results[0].gathers = sorted({name for r in results if isinstance(r, Result) for name in r.gathers})
        return results[0]

    def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Answers of all ranks; None of one that has died."""
        for line in self.lines:
            line.send_bytes(pickle.dumps((method, arguments)))
        out: list[Any] = []
        for rank, line in enumerate(self.lines):
            assert line.poll(PATIENCE_S), f"trainer rank {rank} does not answer"
            try:
                out.append(pickle.loads(line.recv_bytes()))
            except EOFError:
                out.append(None)
        return out

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def trainer_ranks(hf: dict[str, Any], layout: str, ranks: int = 2) -> Iterator[TrainerRanks]:
    them = TrainerRanks(hf, layout, ranks)
    try:
        yield them
    finally:
        them.stop()
