"""The law of tests/sglang_cpu/test_weight_paths.py on one server, with one rank or several, on a CPU or a GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import httpx

from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from rollout.wire import endpoints
from tests.support.published import mapped_segments
from tests.support.source_ranks import connect, source_rank
from tests.support.spawn import run_ranks

SIZES = (1, 200_000, 1 << 30)  # bytes of a bucket: one module each, some, all


class Stock:
    """A stock server of the checkpoint `model`, and other weights of it on the device of the trainer."""

    def __init__(self, url: str, tp_size: int, model: Path, device: str = "cpu") -> None:
        self.url, self.tp_size, self.device, self.checkpoint = url, tp_size, device, HFCheckpoint(model)
        config = self.checkpoint.config
        self.fused = family_of(config).bind(config).fused()

    def weights(self, factor: float) -> list[NamedTensor]:
        named = [(n, self.checkpoint.read(n).to(self.device)) for n in self.checkpoint.names()]
        return [NamedTensor(n, (x.float() * factor).to(x.dtype)) for n, x in named]

    def target(self, **config: object) -> PublishTarget:
        publish = PublishConfig.model_validate(config)
        return PublishTarget(
            urls=(self.url,),
            kind="sglang",
            spec=None,
            config=publish,
            fused=self.fused,
            tp_size=self.tp_size,
            handles=None if publish.path != "tensor" else "cuda" if self.device == "cuda" else "memory",
            timeout_s=300.0,
        )

    def version(self) -> str:
        reply = httpx.get(self.url + endpoints.MODEL_INFO, timeout=60, trust_env=False)
        return str(reply.json()["weight_version"])

    def checksums(self) -> tuple[Mapping[str, str], ...]:
        servers = ServerSet([self.url], 60)
        try:
            return servers.checksums()[0].per_rank
        finally:
            servers.close()


def check_paths(stock: Stock, home: Path, paths: Sequence[str] = ("tensor", "distributed")) -> None:
    """The server has its first weights at the end."""
    first = stock.checksums()
    assert len(first) == stock.tp_size
    shared = SharedDirectory(path=home / "published", hf_config=stock.checkpoint.config, copy_from=None)
    DiskPublisher(stock.target(path="disk"), shared).publish(stock.weights(1.5), version=1)
    wanted = stock.checksums()
    version = 1
    for path in paths:
        publisher = TensorPublisher(stock.target(path=path), send=True)
        for size in SIZES:
            version += 1
            publisher.publish(stock.weights(1.0), version=version)
            assert stock.checksums() == first
            publisher._target = stock.target(path=path, bucket_bytes=size)
            report = publisher.publish(stock.weights(1.5), version=version)
            assert stock.checksums() == wanted, (path, size)
            assert report.bytes == stock.checkpoint.nbytes
        publisher.publish(stock.weights(1.0), version=version)
        del publisher  # and its segments
    assert not mapped_segments(os.getpid())
    for before, after in zip(first, wanted, strict=True):
        assert sum(before[n] != after[n] for n in before) > 0.9 * len(before)  # a few are constants, as k_scale


def check_sources(stock: Stock, model: Path) -> None:
    """Two pipeline stages, each of which sends its layers, give the server what requests with their tensors give it. It
    has its first weights at the end."""
    first = stock.checksums()
    found, _ = run_ranks(_sent_by_stages, 2, stock.url, stock.tp_size, model)
    TensorPublisher(stock.target(path="tensor"), send=True).publish(stock.weights(1.0), version=30)
    assert stock.checksums() == first
    wanted, others, *by_size = found
    assert len(wanted) == stock.tp_size and by_size == [wanted] * 2
    for before, after in zip(others, wanted, strict=True):
        assert sum(before[n] != after[n] for n in before) > 0.9 * len(before)


def _sent_by_stages(
    rank: int, world: int, port: int, url: str, tp_size: int, model: Path
) -> list[list[dict[str, str]]]:
    """What the server reports: of the stages' weights sent within requests; of others; and of the first again, which
    both stages send, by size of a bucket."""
    stock, found, version = Stock(url, tp_size, model), list[list[dict[str, str]]](), 10
    inline = TensorPublisher(replace(stock.target(path="tensor"), handles=None), send=True)

    def request(factor: float) -> None:
        """Collective."""
        nonlocal version
        version += 1
        weights = [NamedTensor(n, (x * factor).clone()) for n, x in r.trainer.export()]
        if not rank:
            inline.publish(weights, version=version)
            found.append([dict(sums) for sums in stock.checksums()])
        r.trainer.signals.meet()

    with source_rank(rank, world, port, model, "pp2, one layer first") as r:
        request(1.0)
        request(1.5)
        for size in SIZES[:2]:
            connect(r, stock.target(path="distributed", bucket_bytes=size))
            version += 1
            report = r.publish(version)
            if not rank:
                assert report.bytes == stock.checkpoint.nbytes and stock.version() == str(version)
                found.append([dict(sums) for sums in stock.checksums()])
            r.trainer.signals.meet()
            if size == SIZES[0]:
                request(1.5)
                found[-1:] = []
    return found
