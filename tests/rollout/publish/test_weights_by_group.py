"""Law: servers that receive weights in a process group serve, bit for bit, what requests with the tensors give them,
and the failure of a member ends the publication within its time limit in a sentence that names that member alone.

Two embedded servers and the sender, over gloo. Why it must hold: a broadcast waits for its slowest member, and a
collective has no message. Not covered: NCCL; stock SGLang and several ranks of a server (tests/sglang_cpu/
test_weight_paths.py).
"""

from __future__ import annotations

import concurrent.futures.thread
import gc
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from miles_like.types import NamedTensor
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from rollout.wire import endpoints
from tests.support.chosen import later
from tests.support.embedded_processes import ServerProcess, begun, server_processes
from tests.support.fakes import wait_until
from tests.support.published import FAMILIES, FORMATS, SIZES, Published
from tests.support.refusals import refuses
from tests.support.spawn import free_port
from tests.support.tiny_models import tiny_dense
from tests.support.wire_bytes import connections, sent_bytes

HERE = "tests/rollout/publish/test_weights_by_group.py"
CASES = [(family, format) for family in FAMILIES for format in FORMATS]
FIRST = [("deepseek", "fp8")]
LIMIT_S = 40.0


def reported(url: str) -> dict[str, str]:
    reply = httpx.get(url + endpoints.CHECKSUM, trust_env=False).json()
    sums: dict[str, str] = reply["ranks"][0]["checksums"]
    return sums


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The endpoints of requests that differ between servers: those that make a group."""
    seen: list[str] = []
    change = ServerSet.change_each

    def noting(self: ServerSet, endpoint: str, *rest: Any) -> None:
        seen.append(endpoint)
        change(self, endpoint, *rest)

    monkeypatch.setattr(ServerSet, "change_each", noting)
    return seen


@pytest.mark.parametrize("case", later(CASES, FIRST, HERE), ids="-".join)
def test_the_served_bits_are_those_of_requests_with_the_tensors(
    case: tuple[str, str], tmp_path: Path, joins: list[str]
) -> None:
    """The group is made once."""
    model = Published(*case)
    with server_processes(model.checkpoint(tmp_path / "hf"), 2) as servers:
        urls = [s.url for s in servers]
        model.publish(model.target(urls), 1, version=1)
        inline = [reported(url) for url in urls]
        assert inline == [model.sums(1)] * 2
        publisher = TensorPublisher(model.target(urls, "distributed"), send=True)
        for version, size in enumerate(SIZES, 2):
            model.publish(model.target(urls), 0, version=version)
            assert reported(urls[0]) != inline[0]
            publisher._target = model.target(urls, "distributed", bucket_bytes=size)
            report = publisher.publish(model.weights(1), version=version)
            assert [reported(url) for url in urls] == inline, size
            assert report.bytes == sum(t.nbytes for t in model.encoded(1).values())
            assert 0 < report.pause_seconds <= report.seconds
        assert joins == [endpoints.INIT_GROUP]


# ---- failures


@pytest.fixture(scope="module")
def model() -> Published:
    """A dense one, of matrices of some hundred KiB."""
    model = Published("qwen", "fp8")
    model.hf = tiny_dense(hidden_size=256, intermediate_size=1024, num_hidden_layers=3)
    model.fused = ()
    return model


@pytest.fixture(scope="module")
def two(model: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Servers, of which a test may replace one."""
    with server_processes(model.checkpoint(tmp_path_factory.mktemp("two") / "hf"), 2) as servers:
        yield servers


def after(number: int, weights: list[NamedTensor], act: Any) -> Iterator[NamedTensor]:
    for i, weight in enumerate(weights):
        if i == number:
            act()
        yield weight


def test_a_server_that_dies_in_the_middle_is_named_and_the_next_group_has_its_successor(
    model: Published, two: list[ServerProcess], joins: list[str]
) -> None:
    """The other keeps the old version, in the state of a publication that failed, and is in both groups."""
    target = model.target([s.url for s in two], "distributed", bucket_bytes=1, timeout_s=LIMIT_S)
    publisher = TensorPublisher(replace(target, spec=None), send=True)
    stream = list(map(NamedTensor._make, model.encoded(2).items()))
    publisher.publish(map(NamedTensor._make, model.encoded(1).items()), version=1)
    began = time.monotonic()
    with refuses(RuntimeError, 2, two[1].url, "--resume", unrecorded="how a connection ends differs") as caught:
        publisher.publish(after(len(stream) // 2, stream, two[1].kill), version=2)
    assert two[0].url not in str(caught.value) and time.monotonic() - began < LIMIT_S / 2
    assert reported(two[0].url) == model.sums(1)
    without = TensorPublisher(replace(target, goes_on=True), send=True)  # the server that is left, in a group with it
    report = without.publish(model.weights(2), version=3)
    assert [fault.url for fault in report.failed] == [two[1].url] and reported(two[0].url) == model.sums(2)
    two[1] = begun(two[1].path, two[1].log, port=two[1].port)
    two[1].await_ready()
    publisher.publish(map(NamedTensor._make, model.encoded(3).items()), version=4)
    assert [reported(s.url) for s in two] == [model.sums(3)] * 2
    assert len(joins) == 3


@pytest.mark.long(beside=HERE)
def test_a_server_that_hangs_in_the_middle_is_named_at_the_time_limit(
    model: Published, two: list[ServerProcess]
) -> None:
    target = model.target([s.url for s in two], "distributed", bucket_bytes=1, timeout_s=6.0)
    publisher = TensorPublisher(replace(target, spec=None), send=True)
    stream = list(map(NamedTensor._make, model.encoded(2).items()))
    publisher.publish(map(NamedTensor._make, model.encoded(1).items()), version=11)
    began = time.monotonic()
    with refuses(RuntimeError, 12, two[1].url, 6, "--resume", unrecorded="it hangs at either request") as caught:
        publisher.publish(after(len(stream) // 2, stream, lambda: two[1].send(signal.SIGSTOP)), version=12)
    assert two[0].url not in str(caught.value) and time.monotonic() - began < 20
    two[1].send(signal.SIGCONT)
    publisher.publish(map(NamedTensor._make, model.encoded(3).items()), version=13)
    assert [reported(s.url) for s in two] == [model.sums(3)] * 2


def test_a_server_that_cannot_join_is_named_before_any_is_paused(model: Published, two: list[ServerProcess]) -> None:
    absent = f"http://127.0.0.1:{free_port()}"
    target = model.target([two[0].url, absent], "distributed", timeout_s=LIMIT_S)
    began = time.monotonic()
    with refuses(RuntimeError, 21, absent, "previous version") as caught:
        TensorPublisher(target, send=True).publish(model.weights(1), version=21)
    assert two[0].url not in str(caught.value) and time.monotonic() - began < LIMIT_S / 2
    body = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    reply = httpx.post(two[0].url + endpoints.GENERATE, json=body, timeout=20, trust_env=False)
    assert len(reply.json()["output_ids"]) == 2  # it is not paused


def test_a_publisher_that_is_not_used_any_more_leaves_its_group(model: Published, two: list[ServerProcess]) -> None:
    """Otherwise each would keep its connections, of NCCL with its buffers, as long as the servers live."""
    before = connections()
    publisher = TensorPublisher(model.target([s.url for s in two], "distributed"), send=True)
    publisher.publish(model.weights(1), version=31)
    assert len(connections() - before) >= 2
    with concurrent.futures.thread._global_shutdown_lock:  # as in the `submit` of a thread that a collection interrupts
        del publisher
        gc.collect()
    assert wait_until(lambda: not connections() - before, 20)


# ---- bytes


def test_bytes_on_the_wire_are_those_of_the_encoded_weights(
    model: Published, two: list[ServerProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of requests and broadcasts to one server, by the kernel's count of acknowledged bytes."""
    bodies = 0
    read = ServerSet._read

    def counting(self: ServerSet, url: str, endpoint: str, content: bytes, headers: Any) -> httpx.Response:
        nonlocal bodies
        bodies += len(content)
        return read(self, url, endpoint, content, headers)

    before = connections()
    publisher = TensorPublisher(model.target([two[0].url], "distributed", bucket_bytes=1 << 20), send=True)
    publisher.publish(model.weights(1), version=41)  # makes the group
    group = connections() - before
    begun_at = sent_bytes(group)
    monkeypatch.setattr(ServerSet, "_read", counting)
    report = publisher.publish(model.weights(2), version=42)
    sent = sent_bytes(group) - begun_at
    assert reported(two[0].url) == model.sums(2)
    assert report.bytes <= sent + bodies <= 1.02 * report.bytes, (report.bytes, sent, bodies)
