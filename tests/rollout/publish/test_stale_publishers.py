"""A publisher of an earlier epoch of its run changes no server: it looks before each request, and an embedded server
that has had a request of a later epoch refuses its own.

Not covered: a stock server, which knows no epochs: there the look alone decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from miles_like.storage.fencing import Fence, StaleEpochError
from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.embedded.server.access import Access
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from rollout.wire import endpoints
from tests.support.fakes import FakeServer
from tests.support.refusals import check_refusal, refuses

WEIGHTS = [NamedTensor(f"model.layers.{i}.input_layernorm.weight", torch.ones(6).bfloat16()) for i in range(4)]


def target(server: FakeServer, fence: Fence, **options: Any) -> PublishTarget:
    config = PublishConfig(bucket_bytes=16, hold_bytes=1)
    return PublishTarget(urls=(server.url,), config=config, spec=None, timeout_s=5.0, fence=fence, **options)


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_a_stale_publisher_sends_nothing_and_says_so(tmp_path: Path, kind: str) -> None:
    old = Fence.begin(tmp_path)
    with FakeServer() as server:
        publisher = TensorPublisher(target(server, old, kind=kind), send=True)
        publisher.publish(WEIGHTS, version=1)
        Fence.begin(tmp_path)
        calls = len(server.calls)
        with refuses(StaleEpochError, 1, 2):
            publisher.publish(WEIGHTS, version=2)
        assert (len(server.calls), server.version, server.paused) == (calls, "1", "")


@pytest.mark.parametrize("kind", ["embedded", "sglang"])
def test_a_publisher_that_becomes_stale_in_the_middle_sends_no_further_bucket(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not even let the servers generate again: they are those of the later start."""
    old, change, sent = Fence.begin(tmp_path), ServerSet.change, 0

    def watched(self: Any, endpoint: str, *rest: Any) -> None:
        nonlocal sent
        change(self, endpoint, *rest)
        sent += endpoint == endpoints.UPDATE_FROM_TENSOR
        if sent == 2:
            Fence.begin(tmp_path)

    monkeypatch.setattr(ServerSet, "change", watched)
    with FakeServer() as server:
        with pytest.raises(StaleEpochError):
            TensorPublisher(target(server, old, kind=kind), send=True).publish(WEIGHTS, version=1)
        asked = [endpoint for endpoint, _ in server.calls]
    assert asked.count(endpoints.UPDATE_FROM_TENSOR) == 2
    assert not {endpoints.END_UPDATE, endpoints.CONTINUE} & set(asked)


def test_a_stale_rank_writes_no_file_for_servers(tmp_path: Path) -> None:
    old = Fence.begin(tmp_path / "run")
    Fence.begin(tmp_path / "run")
    shared = SharedDirectory(path=tmp_path / "published", hf_config={"model_type": "x"}, copy_from=None)
    with FakeServer() as server:
        for rank in (0, 1):
            publisher = DiskPublisher(target(server, old, kind="embedded"), shared, rank=rank, ranks=2)
            with pytest.raises(StaleEpochError):
                publisher.publish(iter(WEIGHTS), version=1)
        assert not server.calls
    assert not (tmp_path / "published").exists()


def test_a_server_refuses_requests_of_an_earlier_epoch_than_it_has_had() -> None:
    came: list[str] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        came.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(*requests: tuple[str, Mapping[str, str]]) -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=Access(inner, host="127.0.0.1", address="127.0.0.1", key=None))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            return [await http.post(path, headers=headers) for path, headers in requests]

    def of(epoch: object) -> dict[str, str]:
        return {endpoints.EPOCH: str(epoch)}

    update = endpoints.UPDATE_FROM_TENSOR
    answers = asyncio.run(
        ask(
            (endpoints.BEGIN_UPDATE, of(1)),
            (endpoints.PAUSE, of(3)),
            (update, of(2)),
            (endpoints.END_UPDATE, of(1)),
            (endpoints.GENERATE, of(9)),  # of a client that is no publisher
            (update, of(3)),
            (update, of("4 or so")),
            (endpoints.HEALTH, of(1)),
        )
    )
    assert [a.status_code for a in answers] == [200, 200, 409, 409, 200, 200, 400, 200]
    assert came == [endpoints.BEGIN_UPDATE, endpoints.PAUSE, endpoints.GENERATE, update, endpoints.HEALTH]
    check_refusal(answers[2].text, 2, 3)
