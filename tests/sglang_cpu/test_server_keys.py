"""Law: stock SGLang, started with a run's key, answers that run alone, and the key is in no file and on no command
line.

SGLang 0.5.23 as it is released, on CPU (`make test-sglang`), with its processes spawned: of forked ones the command
lines would be those of the first. Not covered: a server over several nodes.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from rollout.config import PublishConfig
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from rollout.server_key import ServerKey, sglang_key_file
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from tests.sglang_cpu.serve import SPAWNED
from tests.sglang_cpu.served import START_S, serve
from tests.support.tiny_models import random_tensors, tiny_qwen, write_checkpoint

KEY = ServerKey.new()


class Served(NamedTuple):
    url: str
    directory: Path
    log: Path
    key_file: Path
    commands: list[str]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("keys")
    model = write_checkpoint(home / "hf", tiny_qwen(), random_tensors(tiny_qwen()))
    log, key_file = home / "sglang.log", sglang_key_file(KEY)
    with serve(model, log, SPAWNED, "--config", str(key_file), key=KEY, key_file=key_file) as server:
        server.await_ready(START_S)
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        commands = [" ".join(p.cmdline()) for p in processes]
        yield Served(server.url, model, log, key_file, commands)


CONTROL = {
    endpoints.PAUSE,
    endpoints.CONTINUE,
    endpoints.BEGIN_UPDATE,
    endpoints.END_UPDATE,
    endpoints.UPDATE_VERSION,
    endpoints.CHECKSUM,
    endpoints.ABORT,
}


def test_every_path_but_health_is_refused_without_its_key(served: Served) -> None:
    """The second key, which SGLang calls the admin's, where our table says so: SGLang's own 401 is the judge."""
    with httpx.Client(base_url=served.url, trust_env=False, timeout=60) as http:
        assert http.get(endpoints.HEALTH).status_code == 200
        for path in (endpoints.GENERATE, *sorted(CONTROL), endpoints.UPDATE_FROM_TENSOR, endpoints.UPDATE_FROM_DISK):
            assert http.post(path, json={}).status_code == 401, path
            other = KEY.control if path == endpoints.GENERATE else KEY.sampling
            assert http.post(path, json={}, headers={"authorization": f"Bearer {other}"}).status_code == 401, path
            assert http.post(path, json={}, headers=KEY.headers(path)).status_code != 401, path
        for path in (endpoints.MODEL_INFO, endpoints.SERVER_INFO):
            assert http.get(path).status_code == 401, path
            assert http.get(path, headers=KEY.headers(path)).status_code == 200, path
        http.post(endpoints.CONTINUE, json={}, headers=KEY.headers(endpoints.CONTINUE))


def test_the_run_publishes_and_asks_with_it(served: Served) -> None:
    name = next(n for n in HFCheckpoint(served.directory).names() if n.endswith("model.norm.weight"))
    tensor = NamedTensor(name, HFCheckpoint(served.directory).read(name))
    sender = TensorPublisher(
        PublishTarget(urls=(served.url,), kind="sglang", spec=None, config=PublishConfig(), key=KEY), send=True
    )
    sender.publish([tensor], version=5)

    async def version(key: ServerKey | None) -> int:
        client = SGLangClient(served.url, routing=None, request_timeout_s=60, key=key)
        try:
            return await client.weight_version()
        finally:
            await client.close()

    assert asyncio.run(version(KEY)) == 5
    with pytest.raises(RolloutError, match="HTTP 401: Unauthorized; pass the server's key with"):
        asyncio.run(version(None))
    with pytest.raises(RolloutError, match="HTTP 401"):
        ServerSet([served.url], 60).checksums()


def test_the_key_is_nowhere_to_be_read(served: Served) -> None:
    """SGLang logs its arguments, and its key file is gone once it answers."""
    log = served.log.read_text()
    assert "server_args=" in log and "<server key>" in log
    assert not served.key_file.exists() and len(served.commands) > 2
    every = [log, *served.commands, subprocess.run(["ps", "axww"], capture_output=True, text=True).stdout]
    for secret in (KEY.sampling, KEY.control):
        assert not [text for text in every if secret in text]
