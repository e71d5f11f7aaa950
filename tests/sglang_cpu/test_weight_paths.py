"""Law: stock SGLang serves the same tensors, hash by hash, however the weights reach it: within requests, by handles of
shared memory, in a process group, or from a disk; with one tensor-parallel rank, and with two that take their shards.

SGLang 0.5.23 as it is released, on CPU (`make test-sglang`). DeepSeek's shape, whose fused pair of projections is lost
when it is parted. With buckets of one module, of some and of all. Not covered: CUDA IPC and NCCL (tests/gpu); FP8 and
INT4, whose CPU kernels need AMX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_bridge.families.registry import family_of
from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.publish.buffers import DIRECTORY
from rollout.publish.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from tests.sglang_cpu.served import START_S, serve
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

pytestmark = pytest.mark.slow
HF = tiny()
SIZES = (1, 200_000, 1 << 30)


class Stock(NamedTuple):
    url: str
    tp_size: int
    model: Path


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    home = tmp_path_factory.mktemp("stock")
    model = write_checkpoint(home / "hf", HF, random_tensors(HF))
    with serve(model, home / "sglang.log", "--tp-size", str(request.param)) as server:
        server.await_ready(START_S)
        yield Stock(server.url, request.param, model)


def weights(seed: int) -> list[NamedTensor]:
    return [NamedTensor(name, tensor) for name, tensor in random_tensors(HF, seed).items()]


def target(stock: Stock, **config: object) -> PublishTarget:
    publish = PublishConfig.model_validate(config)
    return PublishTarget(
        urls=(stock.url,),
        kind="sglang",
        spec=None,
        config=publish,
        fused=family_of(HF).bind(HF).fused(),
        tp_size=stock.tp_size,
        handles="memory" if publish.path == "tensor" else None,
        timeout_s=300.0,
    )


def checksums(stock: Stock) -> tuple[Mapping[str, str], ...]:
    servers = ServerSet([stock.url], 60)
    try:
        return servers.checksums()[0].per_rank
    finally:
        servers.close()


def test_each_path_serves_what_a_publication_on_disk_does(stock: Stock, tmp_path: Path) -> None:
    shared = SharedDirectory(path=tmp_path / "published", hf_config=HF, copy_from=stock.model)
    DiskPublisher(target(stock, path="disk"), shared).publish(weights(1), version=1)
    wanted = checksums(stock)
    assert len(wanted) == stock.tp_size
    version = 1
    for path in ("tensor", "distributed"):
        publisher = TensorPublisher(target(stock, path=path), send=True)
        for size in SIZES:
            version += 1
            publisher.publish(weights(2), version=version)
            other = checksums(stock)
            assert sum(a != b for a, b in zip(other[0].values(), wanted[0].values(), strict=True)) > 20
            publisher._target = target(stock, path=path, bucket_bytes=size)
            report = publisher.publish(weights(1), version=version)
            assert checksums(stock) == wanted, (path, size)
            assert report.bytes == sum(t.nbytes for _, t in weights(1))
    assert not list(DIRECTORY.glob("miles-like-*"))
