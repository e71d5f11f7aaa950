"""The memory of publications is bounded and is given back: at most three buffers, each as large as the largest bucket
that it took, for one publication after the other; and no segment of shared memory without its publisher, nor after a
publication that failed.

Why it must hold: a publication passes hundreds of GB through a host whose /dev/shm nothing else would empty. Not
covered: CUDA (tests/gpu/test_handles_cuda.py); a sender that is killed (test_weights_by_handle.py).
"""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from miles_like.types import NamedTensor
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish import buffers
from rollout.publish.buffers import BUCKETS, DIRECTORY, Pool, Segment
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.wire import endpoints
from tests.support.fakes import FakeServer, wait_until
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow  # its servers and encodings take half a minute of `make check`

BUCKET = 40_000
SPEC = QuantSpec(format=QuantFormat.FP8, block=(16, 16))


_made = set[str]()  # names of the segments of this process: other tests make some at the same time


def ours() -> dict[str, int]:
    """The segments of this process that are there: name -> bytes."""
    return {p.name: p.stat().st_size for p in DIRECTORY.glob("miles-like-*") if p.name in _made}


@pytest.fixture(autouse=True)
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    create = Segment._create

    def noted(self: Segment, size: int) -> mmap.mmap:
        _made.add(self.name[1:])
        return create(self, size)

    monkeypatch.setattr(Segment, "_create", noted)
    before = set(ours())
    yield before
    gc.collect()  # an error that was raised refers to its publisher
    assert not set(ours()) - before, "segments are left"


def weights(count: int = 24, seed: int = 0) -> list[NamedTensor]:
    g = torch.Generator().manual_seed(seed)
    return [
        NamedTensor(f"model.layers.{i}.mlp.{name}_proj.weight", torch.randn(96, 96, generator=g).bfloat16())
        for i in range(count)
        for name in ("gate", "up", "down")
    ]


def target(*servers: FakeServer, kind: str = "embedded", tp_size: int = 1, verify: bool = True) -> PublishTarget:
    config = PublishConfig(bucket_bytes=BUCKET, verify=verify)
    return PublishTarget(
        urls=tuple(s.url for s in servers),
        kind=kind,  # type: ignore[arg-type]
        spec=SPEC,
        config=config,
        tp_size=tp_size,
        handles="memory",
        timeout_s=10.0,
    )


def test_a_publication_holds_three_segments_of_a_bucket(foreign: set[str]) -> None:
    """72 tensors in about 20 buckets: no more memory than three of the largest, which is about BUCKET."""
    most, at_once = 0, 0
    with FakeServer() as server:
        take = server._update_weights_from_tensor

        def looking(body: object) -> object:
            nonlocal most, at_once
            held = {n: size for n, size in ours().items() if n not in foreign}
            most = max(most, sum(held.values()))
            at_once = max(at_once, len(held))
            return take(body)

        server._update_weights_from_tensor = looking  # type: ignore[method-assign, assignment]
        publisher = TensorPublisher(target(server), send=True)
        report = publisher.publish(weights(), version=1)
        publisher.publish(weights(), version=2)
        requests = server.endpoints().count(endpoints.UPDATE_FROM_TENSOR)
    assert requests > 5 * BUCKETS and report.bytes > 5 * BUCKETS * BUCKET
    assert at_once == BUCKETS and 2 * BUCKET < most < BUCKETS * 1.3 * BUCKET


def test_a_segment_that_a_reader_has_removed_is_made_again(foreign: set[str]) -> None:
    """As torch in a stock server does when that server ends."""
    with FakeServer() as server:
        publisher = TensorPublisher(target(server), send=True)
        publisher.publish(weights(), version=1)
        first = sorted(set(ours()) - foreign)
        (DIRECTORY / first[0]).unlink()
        publisher.publish(weights(seed=1), version=2)
        assert server.version == "2" and len(set(ours()) - foreign - set(first)) == 1


def test_a_bucket_is_packed_while_servers_load_another() -> None:
    """Bucket k + 2, of two weights as all are, is packed before the servers have answered bucket k."""
    stream, drawn, answered = weights(), 0, 0
    with FakeServer() as server:
        take = server._update_weights_from_tensor

        def slow(body: object) -> object:
            nonlocal answered
            assert wait_until(lambda: drawn >= min(len(stream), 2 * (answered + BUCKETS))), (answered, drawn)
            answered += 1
            return take(body)

        def counted() -> Iterator[NamedTensor]:
            nonlocal drawn
            for weight in stream:
                drawn += 1
                yield weight

        server._update_weights_from_tensor = slow  # type: ignore[method-assign, assignment]
        TensorPublisher(replace(target(server), spec=None), send=True).publish(counted(), version=1)
    assert answered == len(stream) / 2


@pytest.mark.parametrize("fault", ["http_500", "reset", "refuse"])
def test_a_publication_that_fails_leaves_none(fault: str, foreign: set[str]) -> None:
    with FakeServer() as good, FakeServer() as bad:
        publisher = TensorPublisher(target(good, bad), send=True)
        bad.fault = {endpoints.UPDATE_FROM_TENSOR: fault}
        with refuses(RuntimeError, 1, bad.url, "--resume"):
            publisher.publish(weights(), version=1)
        assert good.version != "1" and not set(ours()) - foreign
        bad.fault = {}
        good.in_session = bad.in_session = False
        publisher.publish(weights(), version=2)
        assert good.version == bad.version == "2"


def test_a_weight_that_cannot_be_sent_leaves_none() -> None:
    late = [*weights(), weights()[0]]
    with FakeServer() as server, refuses(RuntimeError, 1, late[-1].name, "--resume"):
        TensorPublisher(replace(target(server), spec=None), send=True).publish(late, version=1)


def test_buffers_are_used_again_and_replaced_by_larger_ones() -> None:
    pool = Pool(Segment)
    small, large = weights(1)[:1], weights(1)[:2]
    first = pool.holding(small)
    assert stat.S_IMODE((DIRECTORY / first.name[1:]).stat().st_mode) == 0o600
    pool.give_back(first)
    assert pool.holding(small) is first
    pool.give_back(first)
    second = pool.holding(large)
    assert second is not first and not (DIRECTORY / first.name[1:]).exists()
    others = [pool.holding(small) for _ in range(BUCKETS - 1)]
    assert len({s.name for s in (second, *others)}) == BUCKETS
    with pytest.raises(AssertionError):
        pool.holding(small)
    pool.close()


def test_no_room_for_a_segment_is_found_before_the_servers_are_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check the process would end by SIGBUS as it writes."""

    def full(fd: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(buffers.os, "posix_fallocate", full)
    with FakeServer() as server:
        with refuses(OSError, "/dev/shm", "publish.bucket_bytes", unrecorded="its size follows from the buckets"):
            TensorPublisher(target(server), send=True).publish(weights(), version=1)
        assert endpoints.PAUSE not in server.endpoints()


def test_each_rank_of_a_stock_server_opens_its_entry() -> None:
    """And each gets, bit for bit, what the quantizer gives, in whole buckets."""
    encoded = dict(quantize_stream(weights(), SPEC))
    with FakeServer() as a, FakeServer() as b:
        a.rank, b.rank = 0, 3
        publisher = TensorPublisher(target(a, b, kind="sglang", tp_size=4), send=True)
        report = publisher.publish(weights(), version=7)
        for server in (a, b):
            assert server.version == "7" and server.weights.keys() == encoded.keys()
            for name, tensor in encoded.items():
                got = server.weights[name]
                assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape), name
                assert torch.equal(got.view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
        bodies = [body for e, body in a.calls if e == endpoints.UPDATE_FROM_TENSOR]
    assert {len(body["serialized_named_tensors"]) for body in bodies} == {4}
    assert {body["load_format"] for body in bodies} == {"flattened_bucket"}
    assert report.bytes == sum(t.nbytes for t in encoded.values())


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_requests_have_less_than_a_hundredth_of_the_bytes(kind: str) -> None:
    """For experts of 768 x 2048, those of Qwen3-30B-A3B, in FP8 codes and scales, and eight ranks of a server."""
    g = torch.Generator().manual_seed(0)
    experts = [
        NamedTensor(
            f"model.layers.0.mlp.experts.{e}.{name}_proj.weight", torch.randn(768, 2048, generator=g).bfloat16()
        )
        for e in range(4)
        for name in ("gate", "up", "down")
    ]
    whole = PublishConfig(verify=False)
    with FakeServer() as server:
        sending = target(server, kind=kind, tp_size=8 if kind == "sglang" else 1)
        sending = replace(sending, spec=QuantSpec(format=QuantFormat.FP8), config=whole)
        report = TensorPublisher(sending, send=True).publish(experts, version=1)
        size = sum(len(json.dumps(body)) for _, body in server.calls)
    assert report.bytes > 4 * 3 * 768 * 2048
    assert size < 0.01 * report.bytes, (size, report.bytes)


def test_the_directory_is_that_of_posix_shared_memory() -> None:
    """Servers open a segment by the name with shm_open, which knows this directory only."""
    pool = Pool(Segment)
    segment = pool.holding(weights(1)[:1])
    assert Path(f"/dev/shm{segment.name}").stat().st_size == buffers.HEADER + segment.capacity
    pool.close()
