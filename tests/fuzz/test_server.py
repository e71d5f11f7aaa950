"""Bounded tier of the target `server`: hostile requests beside a legitimate client, and requests drawn from the
server's own OpenAPI schema.

Why it must hold: see tests/rollout/embedded/server/test_hostile_requests.py. The schema is held to what the server
does: what it calls invalid is refused, and every answer has a status, a content type and a body that it declares. Not
covered: latencies, which the long tier measures.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from rollout.wire import endpoints
from rollout.wire.bodies import MemoryTag
from tests.fuzz.hostile import Maker, send
from tests.fuzz.served import Client, Served, served

REQUESTS = 300  # at least, of both tests
HOSTILE = 200
DRAWN = 4  # of each operation and mode
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("fuzzed"), "--max-samples-per-request", "16") as at:
        yield at


@pytest.mark.long(beside="tests/rollout/embedded/server/test_hostile_requests.py")
def test_hostile_requests_beside_a_legitimate_client(server: Served, tmp_path: Path) -> None:
    client, make = Client(server.url), Maker(server.path, tmp_path / "bad")
    client.some(8)
    with client.beside():
        for i in range(HOSTILE):
            hostile = make.draw(random.Random(i))
            answer = send(server.url, hostile)
            assert answer.status not in (-1, 500), (i, hostile, answer)
            assert answer.status < 400 or answer.is_sentence, (i, hostile, answer)
    client.some(8)
    assert client.asked > 20 and (client.wrong, client.failed) == (0, 0)
    assert server.healthy() and "Traceback" not in server.log.read_text()


def operations(url: str) -> list[Any]:
    schema = schemathesis.openapi.from_dict(httpx.get(url + "/openapi.json", trust_env=False).json())
    schema.config.update(base_url=url)
    return [result.ok() for result in schema.get_all_operations()]


def restore(server: Served) -> None:
    """The memory that was released, and the weights that were lost with it."""
    for tag in MemoryTag:
        httpx.post(server.url + endpoints.RESUME_MEMORY, json={"tags": [tag]}, trust_env=False)
    if httpx.post(server.url + endpoints.CHECKSUM, content=b"{}", trust_env=False).status_code == 400:
        body = {"model_path": str(server.path)}
        assert httpx.post(server.url + endpoints.UPDATE_FROM_DISK, json=body, trust_env=False, timeout=30).is_success


def test_every_answer_is_one_that_the_schema_declares(server: Served) -> None:
    """GET /flush_cache and its like have no body to draw; pauses and releases are ended at once, or nothing would be
    answered."""
    client, asked = Client(server.url), 0
    client.some(8)
    for operation in operations(server.url):
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and operation.method == "get":
                continue

            @settings(
                max_examples=DRAWN,
                deadline=None,
                derandomize=True,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                nonlocal asked
                asked += 1
                case.call_and_validate(checks=CHECKS, timeout=30)
                if case.path == endpoints.PAUSE:
                    httpx.post(server.url + endpoints.CONTINUE, content=b"{}", trust_env=False)
                if case.path == endpoints.RELEASE_MEMORY:
                    restore(server)

            check()
    assert asked >= REQUESTS - HOSTILE
    httpx.post(server.url + endpoints.UPDATE_VERSION, json={"new_version": "0"}, trust_env=False)
    client.some(8)
    assert (client.wrong, client.failed) == (0, 0) and server.healthy()
    assert "Traceback" not in server.log.read_text()
