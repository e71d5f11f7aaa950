"""A publication to a server or a disk that takes longer than a collective may: no rank waits in a collective meanwhile.

Two tensor-parallel Megatron ranks over gloo, whose groups all have a limit of LIMIT_S seconds. Not covered: NCCL.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from miles_like.cluster.pacing import Pacer
from miles_like.cluster.rank import Rank
from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.wire import endpoints
from tests.support import toy
from tests.support.fakes import FakeServer
from tests.support.refusals import check_refusal
from tests.support.spawn import free_port, run_ranks, warm_context

LIMIT_S, SLOW_S = 5.0, 7.0
SMALL = 40_000  # bytes of a chunk, and of a bucket of the export: the tiny model has several of each


class _Unpaced:
    """In a pacer's place: the other ranks drain the stream at once."""

    def paced(self, weights: Any, *, together: bool = False) -> Any:
        return weights


def _rank(rank: int, world: int, port: int, hf: str, urls: tuple[str, ...]) -> Any:
    """A rank whose export has small buckets, and whose groups then have the short limit."""
    from megatron.core import parallel_state as mpu

    from megatron_bridge.trainer import MegatronTrainer
    from megatron_bridge.weights.export import ExportPlan

    at: dict[str, Any] = {"master_addr": "127.0.0.1", "master_port": port, "loss": toy.PolicyGradient()}
    t = MegatronTrainer(toy.config(hf, tp=2), rank=rank, world_size=world, **at)
    t._export = ExportPlan(t.chunks, t.family, t.hf, t.parallel, bucket_bytes=SMALL)
    for group in mpu._global_process_group_list:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S), group)
    found: Any = Rank()
    found.rank, found.world, found.trainer = rank, world, t
    found.pacer = Pacer(t.signals, sends=rank == 0, chunk_bytes=SMALL)
    _connect(found, urls, 4 * SMALL)
    return found


def _connect(rank: Rank, urls: tuple[str, ...], bucket_bytes: int) -> None:
    """A publisher that has sent nothing, and so sends everything."""
    config = PublishConfig(bucket_bytes=bucket_bytes, hold_bytes=1)
    target = PublishTarget(urls=urls, kind="embedded", spec=None, config=config)
    rank.connect(lambda rank, ranks: TensorPublisher(target, send=rank == 0))


def _slow(times: int) -> Callable[[Any], None]:
    """A fault of a server that takes SLOW_S for each of its first `times` requests."""
    left = [times]

    def fault(body: Any) -> None:
        if left[0]:
            left[0] -= 1
            time.sleep(SLOW_S)

    return fault


def _publications(rank: int, world: int, port: int, hf: str) -> dict[str, Any]:
    """Of a quick server, a slow one, and a slow one of ranks that drain at once: what the server then holds, or the
    error."""
    found: dict[str, Any] = {}
    with FakeServer() as server:
        r = _rank(rank, world, port, hf, (server.url,))
        quick = r.publish(1)
        found["quick"] = {n: x.clone() for n, x in server.weights.items()}, quick.bytes
        server.weights.clear()
        _connect(r, (server.url,), 4 * SMALL)
        server.fault = {endpoints.UPDATE_FROM_TENSOR: _slow(1)}
        began = time.monotonic()
        slow = r.publish(2)
        found["slow"] = dict(server.weights), slow.bytes
        found["seconds"] = time.monotonic() - began
        found["requests"] = sum(e == endpoints.UPDATE_FROM_TENSOR for e, _ in server.calls) // 2
        server.fault = {endpoints.UPDATE_FROM_TENSOR: _slow(1)}
        r.pacer = _Unpaced()
        _connect(r, (server.url,), SMALL)
        try:
            r.publish(4)
            found["unpaced"] = "no error"
        except RuntimeError as e:
            found["unpaced"] = str(e)
    return found


@pytest.mark.long(beside="tests/miles_like/cluster/test_pacing.py")
def test_a_server_may_be_slower_than_a_collective(tmp_path: Path) -> None:
    """The same bytes arrive as at a quick server. Ranks that drain the stream at once, as without pacing, are ended."""
    sender, other = run_ranks(_publications, 2, toy.hf_dir(tmp_path / "hf"))
    assert sender["seconds"] > SLOW_S and sender["requests"] > 2
    (held, nbytes), (held_slow, nbytes_slow) = sender["quick"], sender["slow"]
    assert nbytes == nbytes_slow == sum(x.nbytes for x in held.values())
    assert held.keys() == held_slow.keys() and all(torch.equal(held[n], held_slow[n]) for n in held)
    assert "Timed out waiting" in other["unpaced"], (sender["unpaced"], other["unpaced"])


class _SlowDisk(DiskPublisher):
    """Rank 1 takes SLOW_S for one of its tensors."""

    def _encoded(self, own: Iterator[NamedTensor]) -> Iterator[NamedTensor]:
        def slow() -> Iterator[NamedTensor]:
            for i, item in enumerate(own):
                if self._rank == 1 and i == 3:
                    time.sleep(SLOW_S)
                yield item

        return super()._encoded(slow())


def _written(rank: int, world: int, port: int, hf: str, where: Path, paced: bool) -> str | int:
    """Tensors of the directory, or the error."""
    with FakeServer() as server:
        r = _rank(rank, world, port, hf, (server.url,))
        target = PublishTarget(urls=(server.url,), kind="embedded", spec=None, config=PublishConfig(path="disk"))
        shared = SharedDirectory(path=where, hf_config={}, copy_from=None)
        r.connect(lambda rank, ranks: _SlowDisk(target, shared, rank=rank, ranks=ranks))
        if not paced:
            r.pacer = _Unpaced()
        try:
            r.publish(1)
        except RuntimeError as e:
            return str(e)
        return len(server.weights)


@pytest.mark.long(beside="tests/miles_like/cluster/test_pacing.py")
def test_a_rank_s_disk_may_be_slower_than_a_collective(tmp_path: Path) -> None:
    """Where each writes its part. Without pacing the other rank waits in the next collective, and is ended."""
    hf = toy.hf_dir(tmp_path / "hf")
    held, _ = run_ranks(_written, 2, hf, tmp_path / "paced", True)
    assert isinstance(held, int) and held > 20
    assert "Timed out waiting" in str(run_ranks(_written, 2, hf, tmp_path / "unpaced", False)[0])


def _dies(rank: int, world: int, port: int, hf: str, out: Path) -> None:
    """The sender's process ends in its second request; the other rank writes its error to `out`."""
    with FakeServer() as server:
        server.fault = {endpoints.UPDATE_FROM_TENSOR: lambda body: os._exit(9)}
        r = _rank(rank, world, port, hf, (server.url,))
        try:
            r.publish(1)
        except RuntimeError as e:
            out.write_text(str(e))


def test_a_sender_that_dies_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    hf, port, out = toy.hf_dir(tmp_path / "hf"), free_port(), tmp_path / "error"
    context = warm_context()
    processes = [context.Process(target=_dies, args=(r, 2, port, hf, out)) for r in range(2)]
    for p in processes:
        p.start()
    try:
        processes[1].join(60)
        assert (processes[0].exitcode, processes[1].exitcode) == (9, 0)
    finally:
        for p in processes:
            p.kill()
            p.join()
    message = out.read_text()
    # the sender gathers while a bucket is on its way: its end may break a collective
    if "by peer" not in message:
        check_refusal(message, "rank 0", "log", unrecorded="it is that of gloo where a collective breaks")


class _Signals:
    """Signals of one process, which are noted."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.sent: list[str] = []

    def send(self, name: str) -> None:
        assert name not in self.known
        self.known.add(name)
        self.sent.append(name)

    def wait_for(self, name: str) -> None:
        assert name in self.known, f"{name} was not sent"

    def forget(self, name: str) -> None:
        self.known.remove(name)


def test_ranks_cut_a_stream_alike_and_signals_do_not_pile_up() -> None:
    """Each chunk is gathered whole when its first tensor is asked for; none before."""
    tensors = [NamedTensor(str(i), torch.zeros(n, dtype=torch.uint8)) for i, n in enumerate((3, 5, 1, 1, 9, 2, 0))]
    signals, gathered = _Signals(), list[str]()

    def stream() -> Any:
        for item in tensors:
            gathered.append(item.name)
            yield item

    sender, other = (Pacer(signals, sends=sends, chunk_bytes=6) for sends in (True, False))
    for _ in range(3):
        gathered.clear()
        seen = []
        for item in sender.paced(stream()):
            seen.append((item.name, len(gathered)))
        assert seen == [("0", 2), ("1", 2), ("2", 5), ("3", 5), ("4", 5), ("5", 7), ("6", 7)]
        assert [x.name for x in other.paced(iter(tensors))] == [x.name for x in tensors]
        assert len(signals.known) == 4
    assert len(signals.sent) == 12
