"""Publication beside what it cannot do without: on disk beside a plain write, by handles of shared memory beside a copy
in memory, in a process group beside gloo's own broadcast.

The weights are those of a layer with experts of Qwen3-30B-A3B's shapes. A plain loop writes as many bytes in pieces of
64 MiB and syncs the file; then one rank, and two ranks at once, encode and write the weights as
`rollout/publish/directory/disk_publisher.py` does, and the parts are joined; by turns. Then one rank, and two ranks at
once, encode their shares and drop the result; and one source, and two at once, encode their experts into the buffers
that a process group would send (`rollout/publish/sources`). Each figure is the median over the rounds of a ratio within
one round; the first round does not count. Ranks are processes of one thread that have the weights in memory: the
gather, the requests and the servers' loading are not in the figures of the disk. By handles and in a group one rank
publishes the weights in BF16 to a process that copies them to its parameters, as a rank of stock SGLang does: requests,
packing, receiving and that copy are in these figures (`weight_receiver.py`). From shards to slices two ranks publish to
an embedded server of two ranks (`weight_slices.py`), at most a quarter of the experts, beside the same broadcast. Bytes
are those of the files; of requests and broadcasts on a loopback device of the benchmark's own, which takes root; of the
segments of shared memory; and those that ranks of the server report.

    python benchmarks/weight_sync.py [--quick] [--directory DIR]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
from figures import add_write, finish
from weight_receiver import bare, broadcast, copied, own_network, published, receiver
from weight_slices import resharded

from megatron_bridge.device.device import keep_freed_memory
from miles_like.hf.checkpoint import write_hf
from miles_like.hf.merged import join_parts
from miles_like.types import NamedTensor
from quant.spec import QuantFormat, QuantSpec
from quant.stream import Named, quantize_stream
from rollout.config import PublishConfig
from rollout.publish.directory.shares import Shares
from rollout.publish.publication import PublishTarget
from rollout.publish.sources.publisher import SourcesPublisher

GOALS = {
    "bf16_of_raw_write_min": 0.5,
    "fp8_two_ranks_of_one_min": 1.7,
    "fp8_encode_two_ranks_of_one_min": 1.8,
    "int4_encode_two_ranks_of_one_min": 1.8,
    "fp8_pack_two_sources_of_one_min": 1.8,
    "int4_pack_two_sources_of_one_min": 1.8,
    "tensor_of_memcpy_min": 0.5,
    "distributed_of_gloo_min": 0.6,
    "reshard_bytes_of_slices_max": 1.0,
    "disk_bytes_of_encoded_max": 1.02,
    "tensor_bytes_of_encoded_max": 1.02,
    "distributed_bytes_of_encoded_max": 1.02,
}
HIDDEN, EXPERT = 2048, 768
SLICED = 64  # experts at most of the publication to slices: four processes hold them, two of them in FP32
BUCKET = 64 << 20  # of sources, which hold three each
PIECE = 64 << 20
Work = Callable[[Path, list[NamedTensor], int, int, QuantSpec | None], None]


def weights(experts: int) -> list[NamedTensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"gate_proj": (EXPERT, HIDDEN), "up_proj": (EXPERT, HIDDEN), "down_proj": (HIDDEN, EXPERT)}
    return [
        NamedTensor(f"model.layers.0.mlp.experts.{e}.{name}.weight", torch.randn(shape, generator=g).bfloat16())
        for e in range(experts)
        for name, shape in shapes.items()
    ]


def raw_write(path: Path, nbytes: int) -> float:
    """Seconds."""
    began = time.perf_counter()
    piece = torch.zeros(PIECE, dtype=torch.uint8).numpy().data
    with path.open("wb", buffering=0) as f:
        for _ in range(nbytes // PIECE):
            f.write(piece)
        os.fsync(f.fileno())
    return time.perf_counter() - began


def encoded(stream: list[NamedTensor], number: int, count: int, spec: QuantSpec | None) -> Iterator[Named]:
    """The share of rank `number`."""
    return quantize_stream(Shares(count, spec).of(number, stream), spec)


def write(where: Path, stream: list[NamedTensor], number: int, count: int, spec: QuantSpec | None) -> None:
    write_hf(where / f"part{number}", encoded(stream, number, count, spec), {"model_type": "qwen3_moe"})


def drop(where: Path, stream: list[NamedTensor], number: int, count: int, spec: QuantSpec | None) -> None:
    for _ in encoded(stream, number, count, spec):
        pass


def pack(where: Path, stream: list[NamedTensor], number: int, count: int, spec: QuantSpec | None) -> None:
    """As source `number` of `count` expert-parallel ranks: each bucket is packed once a buffer is free."""
    config = PublishConfig(path="distributed", bucket_bytes=BUCKET)
    target = PublishTarget(urls=("http://unused",), kind="sglang", spec=spec, config=config)
    publisher: Any = SourcesPublisher(target, rank=number)
    size = len(stream) // count
    for bucket in publisher._encoded(iter(stream[number * size : (number + 1) * size])):
        publisher.host.give(bucket.nbytes)
        publisher._transport._pool.give_back(*bucket.send.args)


def rank(work: Work, begin: Barrier, *given: Any) -> None:
    torch.set_num_threads(1)
    begin.wait()
    work(*given)


def at_once(work: Work, where: Path, stream: list[NamedTensor], count: int, spec: QuantSpec | None) -> float:
    """Seconds from the start of `count` ranks' work until all have ended."""
    context = multiprocessing.get_context("fork")
    begin = context.Barrier(count + 1)
    given = [(work, begin, where, stream, i, count, spec) for i in range(count)]
    ranks = [context.Process(target=rank, args=one) for one in given]
    for process in ranks:
        process.start()
    begin.wait()
    began = time.perf_counter()
    for process in ranks:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - began


def publish(where: Path, stream: list[NamedTensor], count: int, spec: QuantSpec | None) -> float:
    """Seconds from the first rank's first tensor to the joined directory."""
    seconds, began = at_once(write, where, stream, count, spec), time.perf_counter()
    join_parts([where / f"part{i}" for i in range(count)], where / "version")
    return seconds + time.perf_counter() - began


def round_of(where: Path, stream: list[NamedTensor], *, alone: bool) -> dict[str, float]:
    """The figures of one round. alone: of `requested`."""
    nbytes = sum(t.nbytes for _, t in stream)
    raw = nbytes / raw_write(where / "raw", nbytes)
    out = {"raw_write_gb_s": raw / 1e9}
    for name, spec in {"bf16": None, "fp8": QuantSpec(format=QuantFormat.FP8)}.items():
        rates = []
        for count in (1, 2):
            rates.append(nbytes / publish(where, stream, count, spec))
            if spec is None:
                written = sum(f.stat().st_size for f in (where / "version").glob("*.safetensors"))
                out["disk_bytes_of_encoded"] = written / nbytes
            shutil.rmtree(where / "version")
        out[f"{name}_one_rank_gb_s"] = rates[0] / 1e9
        out[f"{name}_of_raw_write"] = rates[0] / raw
        out[f"{name}_two_ranks_of_one"] = rates[1] / rates[0]
    for name, format in (("fp8", QuantFormat.FP8), ("int4", QuantFormat.INT4)):
        one, two = (at_once(drop, where, stream, count, QuantSpec(format=format)) for count in (1, 2))
        out[f"{name}_encode_one_rank_gb_s"] = nbytes / one / 1e9
        out[f"{name}_encode_two_ranks_of_one"] = one / two
        one, two = (at_once(pack, where, stream, count, QuantSpec(format=format)) for count in (1, 2))
        out[f"{name}_pack_one_source_gb_s"] = nbytes / one / 1e9
        out[f"{name}_pack_two_sources_of_one"] = one / two
    return out | requested(stream, nbytes, alone=alone)


def requested(stream: list[NamedTensor], nbytes: int, *, alone: bool) -> dict[str, float]:
    """The figures of publications by handles and in a group. alone: no other process uses the loopback device."""
    copy, gloo = copied(nbytes), broadcast(nbytes)
    alone_tensor, alone_distributed = bare(stream, "tensor"), bare(stream, "distributed")
    with receiver() as url:
        tensor, distributed = published(url, stream, "tensor"), published(url, stream, "distributed")
    out = {
        "memcpy_gb_s": copy / 1e9,
        "tensor_gb_s": tensor.rate / 1e9,
        "tensor_of_memcpy": tensor.rate / copy,
        "tensor_copies_of_memcpy": alone_tensor / copy,
        "tensor_pause_s": tensor.pause_s,
        "gloo_gb_s": gloo / 1e9,
        "distributed_gb_s": distributed.rate / 1e9,
        "distributed_of_gloo": distributed.rate / gloo,
        "distributed_copies_of_gloo": alone_distributed / gloo,
        "distributed_pause_s": distributed.pause_s,
    }
    slices = resharded(min(SLICED, len(stream) // 3), HIDDEN, EXPERT)
    out |= {
        "reshard_gb_s": slices.rate / 1e9,
        "reshard_of_gloo": slices.rate / gloo,
        "reshard_pause_s": slices.pause_s,
        "reshard_bytes_of_slices": slices.of_slices,
    }
    wire = {"tensor_bytes_of_encoded": 1 + tensor.wire, "distributed_bytes_of_encoded": distributed.wire}
    return out | (wire if alone else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--directory", type=Path, default=None)
    add_write(parser)
    given = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as ranks of the trainer do; the processes that are forked inherit it
    rounds, experts = (2, 64) if given.quick else (6, 256)
    stream, found, alone = weights(experts), [], own_network()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(dir=given.directory) as where:
            found.append(round_of(Path(where), stream, alone=alone))
    figures = {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}
    goals = {key: goal for key, goal in GOALS.items() if key[:-4] in figures}
    holds = all(figures[k[:-4]] >= goal if k.endswith("_min") else figures[k[:-4]] <= goal for k, goal in goals.items())
    finish("weight_sync", figures, goals, holds)


if __name__ == "__main__":
    main()
