"""Law: a trainer rank that is killed in the middle of a publication leaves no segment of shared memory, and its servers
take the next publisher's weights.

Why it must hold: no process of a run that was killed is there to give back hundreds of MiB. Not covered: a container
that is killed with all its processes while /dev/shm is the host's.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import httpx
import pytest

from miles_like.types import NamedTensor
from rollout.publish.publisher import TensorPublisher
from rollout.wire import endpoints
from tests.support.embedded_processes import ServerProcess, server_processes
from tests.support.fakes import wait_until
from tests.support.published import Published, mapped_segments
from tests.support.spawn import warm_context

MODEL = Published("qwen", "bf16")
PATHS: tuple[Literal["tensor", "distributed"], ...] = ("tensor", "distributed")


def publish_until(reached: Path, url: str, path: Literal["tensor", "distributed"], version: int) -> None:
    """Publishes one module at a time, and waits before the last ones."""

    def stream() -> Iterator[NamedTensor]:
        weights = MODEL.weights(1)
        for i, weight in enumerate(weights):
            if i == len(weights) - 5:
                reached.touch()
                time.sleep(600)
            yield weight

    handles = "memory" if path == "tensor" else None
    target = MODEL.target([url], path, bucket_bytes=1, handles=handles)
    TensorPublisher(target, send=True).publish(stream(), version=version)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_processes(MODEL.checkpoint(tmp_path_factory.mktemp("killed") / "hf"), 1) as (one,):
        yield one


@pytest.mark.parametrize("path", PATHS)
def test_a_killed_sender_leaves_nothing(
    path: Literal["tensor", "distributed"], server: ServerProcess, tmp_path: Path
) -> None:
    reached = tmp_path / "reached"
    version = 10 * (1 + PATHS.index(path))
    arguments = (reached, server.url, path, version)
    sender = warm_context().Process(target=publish_until, args=arguments, daemon=True)
    sender.start()
    assert wait_until(reached.exists, 240)
    assert sender.pid is not None
    held = mapped_segments(sender.pid)
    assert bool(held) == (path == "tensor")
    os.kill(sender.pid, signal.SIGKILL)
    sender.join(30)
    assert wait_until(lambda: not any(path.exists() for path in held), 60)
    handles = "memory" if path == "tensor" else None
    target = MODEL.target([server.url], path, handles=handles)
    report = TensorPublisher(target, send=True).publish(MODEL.weights(2), version=version + 1)
    reply = httpx.get(server.url + endpoints.CHECKSUM, trust_env=False).json()
    assert reply["ranks"][0]["checksums"] == MODEL.sums(2) and report.bytes > 0
