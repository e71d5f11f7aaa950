"""A process that receives weights as a rank of a server does: by handles of shared memory and in a process group.

What a publication costs beside the copies and broadcasts that it cannot do without: rates of both, by the same memory
and the same two processes.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import io
import json
import multiprocessing
import os
import pickle
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]

from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.publish.buckets import cut
from rollout.publish.buffers import BUCKETS, Buffer, Pool, Segment
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.sglang.ports import free_port
from rollout.wire import endpoints
from rollout.wire.control import InitGroup, UpdateFromDistributed
from rollout.wire.flat import Layout, dtype_of, encode_memory_handle, flat_bytes, layout_of
from rollout.wire.groups import join_group, leave_group

BUCKET = PublishConfig().bucket_bytes
LIMIT_S = 600.0
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class _Tensor(NamedTuple):
    """SGLang's record of a tensor in a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int
    nbytes: int


class _Bucket(pickle.Unpickler):
    """Reads a bucket without SGLang."""

    def find_class(self, module: str, name: str) -> Any:
        return _Tensor if module.startswith("sglang") else super().find_class(module, name)


class _Rank:
    """Receives as a rank of stock SGLang does: it maps a segment, or receives a broadcast in memory that it has, and
    copies each tensor to its parameter."""

    def __init__(self) -> None:
        self.parameters: dict[str, Tensor] = {}
        self.bucket = torch.zeros(0, dtype=torch.uint8)
        self.group: ProcessGroup | None = None

    def load(self, flat: Tensor, places: Iterable[tuple[str, int, int]]) -> None:
        """places: name, first byte and bytes of each tensor."""
        for name, start, nbytes in places:
            if name not in self.parameters:
                self.parameters[name] = torch.zeros(nbytes, dtype=torch.uint8)
            self.parameters[name].copy_(flat[start : start + nbytes])

    def open_segment(self, text: str) -> None:
        bucket = _Bucket(io.BytesIO(base64.b64decode(text))).load()
        self.load(bucket["flattened_tensor"], [(t.name, t.start, t.nbytes) for t in bucket["metadata"]])

    def join(self, asked: InitGroup) -> None:
        store = TCPStore(asked.master_address, asked.master_port, None, False, timedelta(seconds=LIMIT_S), False)
        size, name = asked.world_size, asked.group_name
        self.group = join_group(store, name=name, rank=1, size=size, backend="gloo", timeout_s=LIMIT_S)

    def receive(self, layout: Layout) -> None:
        if self.bucket.nbytes < flat_bytes(layout):
            self.bucket = torch.zeros(flat_bytes(layout), dtype=torch.uint8)
        assert self.group is not None
        self.group.broadcast(self.bucket[: flat_bytes(layout)], 0).wait()
        self.load(self.bucket, [(t.name, t.start, t.nbytes) for t in layout])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rank = _Rank()

    def do_GET(self) -> None:
        self._answer(b'{"model_path": "", "weight_version": "0", "tokenizer_path": null}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        match self.path:
            case endpoints.UPDATE_FROM_TENSOR:
                self.rank.open_segment(body["serialized_named_tensors"][0])
            case endpoints.INIT_GROUP:
                self.rank.join(InitGroup.from_json(body))
            case endpoints.UPDATE_FROM_DISTRIBUTED:
                asked = UpdateFromDistributed.from_json(body)
                self.rank.receive(layout_of(zip(asked.names, map(dtype_of, asked.dtypes), asked.shapes, strict=True)))
        self._answer(b'{"success": true, "message": ""}')

    def _answer(self, answer: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


def _serve(port: int, line: Connection) -> None:
    torch.set_num_threads(1)
    with ThreadingHTTPServer(("127.0.0.1", port), _Handler) as http:
        line.send("ready")
        http.serve_forever()


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """The URL of a receiving process."""
    port, context = free_port(), multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(port, theirs), daemon=True)
    process.start()
    ours.recv()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.join()


class Published(NamedTuple):
    rate: float  # bytes/s
    wire: float  # bytes that the loopback device received, as a share of the published ones
    pause_s: float


def published(url: str, stream: list[NamedTensor], path: Literal["tensor", "distributed"]) -> Published:
    """The second of two publications: the first one makes the group, the segments and the parameters."""
    handles: dict[str, Any] = {"handles": "memory"} if path == "tensor" else {}
    config = PublishConfig(path=path, bucket_bytes=BUCKET, verify=False)
    target = PublishTarget(urls=(url,), kind="sglang", spec=None, config=config, timeout_s=LIMIT_S, **handles)
    publisher = TensorPublisher(target, send=True)
    publisher.publish(stream, version=1)
    before = loopback_bytes()
    report = publisher.publish(stream, version=2)
    wire = (loopback_bytes() - before) / report.bytes
    return Published(report.bytes / report.seconds, wire, report.pause_seconds)


def own_network() -> bool:
    """Give this process a network with a loopback device that no other process uses. False without the right to."""
    if os.geteuid() != 0 or ctypes.CDLL(None).unshare(_NEW_NETWORK) != 0:
        return False
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    return True


def loopback_bytes() -> int:
    """Received so far by the loopback device of this process's network, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[0]) for line in lines if line.split(":")[0].strip() == "lo")


def copied(nbytes: int) -> float:
    """Bytes/s of copies between two buffers in memory."""
    source, to = torch.ones(BUCKET, dtype=torch.uint8), torch.zeros(BUCKET, dtype=torch.uint8)
    count = max(1, nbytes // BUCKET)
    began = time.perf_counter()
    for _ in range(count):
        to.copy_(source)
    return count * BUCKET / (time.perf_counter() - began)


def broadcast(nbytes: int) -> float:
    """Bytes/s of gloo's broadcasts between two processes."""
    port, context = free_port(), multiprocessing.get_context("fork")
    count = max(1, nbytes // BUCKET)
    other = context.Process(target=_broadcasts, args=(1, port, count), daemon=True)
    other.start()
    rate = count * BUCKET / _broadcasts(0, port, count)
    other.join()
    return rate


def _broadcasts(rank: int, port: int, count: int) -> float:
    """Seconds of `count` broadcasts by rank 0, until rank 1 has all of them."""
    torch.set_num_threads(1)
    group = _group(rank, port)
    buffer = torch.ones(BUCKET, dtype=torch.uint8)
    group.broadcast(buffer, 0).wait()
    group.barrier().wait()
    began = time.perf_counter()
    for _ in range(count):
        group.broadcast(buffer, 0).wait()
    group.barrier().wait()
    seconds = time.perf_counter() - began
    leave_group(group)
    return seconds


def bare(stream: list[NamedTensor], path: Literal["tensor", "distributed"]) -> float:
    """Bytes/s of the copies alone that a publication makes, without requests, versions and a pause: one process packs
    buckets, of which three exist, and another one maps or receives each and copies it to its parameters."""
    port, context = free_port(), multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    other = context.Process(target=_bare_rank, args=(theirs, port if path == "distributed" else None), daemon=True)
    other.start()
    group = _group(0, port) if path == "distributed" else None
    pool: Any = Pool(Segment if group is None else Buffer)
    parts = list(cut(stream, BUCKET))
    for _ in range(2):  # the first time makes the buffers and the parameters
        began, away = time.perf_counter(), deque[Any]()
        for part in parts:
            if len(away) == BUCKETS - 1:
                ours.recv()
                pool.give_back(away.popleft())
            away.append(held := pool.holding(part))
            if group is None:
                ours.send(encode_memory_handle(held.name, held.layout))
            else:
                ours.send(held.layout)
                group.broadcast(held.tensor, 0).wait()
        while away:
            ours.recv()
            pool.give_back(away.popleft())
        seconds = time.perf_counter() - began
    ours.send(None)
    other.join()
    pool.close()
    if group is not None:
        leave_group(group)
    return sum(t.nbytes for _, t in stream) / seconds


def _bare_rank(line: Connection, port: int | None) -> None:
    torch.set_num_threads(1)
    rank = _Rank()
    rank.group = None if port is None else _group(1, port)
    while (asked := line.recv()) is not None:
        if isinstance(asked, str):
            rank.open_segment(asked)
        else:
            rank.receive(asked)
        line.send(None)
    if rank.group is not None:
        leave_group(rank.group)


def _group(rank: int, port: int) -> ProcessGroup:
    """Of two processes."""
    store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=LIMIT_S), False)
    return join_group(store, name="benchmark", rank=rank, size=2, backend="gloo", timeout_s=LIMIT_S)
