"""A hostile request is refused in a sentence, and costs other clients nothing.

Why it must hold: a rollout of hours is shared by all clients of a server; one request must not end it. Each named kind
ended or hung the engine when the server had no bounds. Not covered: a flood from many machines.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fuzz.hostile import DIRECTORIES, Hostile, killers, send
from tests.fuzz.served import Client, Served, served

NAMES = (
    *("rid a number, then an abort", "rid a number, and its client leaves", "stop_token_ids 2**63"),
    *("top_k 2**63", "sample_index 2**63", "3,000,000 stop tokens"),
    *("n 10**13", "n 2**64 - 1", "n 200,000", "n 10**8", "1,000 prompts of 1,000 samples", "a text of 20 MB"),
    *("100,000 texts", "a path of 5,000 letters", "/dev/zero", "a file", *DIRECTORIES),
)

POST = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("hostile"), "--arrival-timeout", "1", "--max-connections", "64") as at:
        yield at


@pytest.fixture(scope="module")
def kinds(server: Served, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Hostile]]:
    return killers(server.path, tmp_path_factory.mktemp("directories"))


@pytest.fixture(scope="module")
def client(server: Served) -> Client:
    client = Client(server.url)
    client.some(8)
    return client


def unharmed(server: Served, client: Client) -> None:
    """All answers are those of before."""
    client.some(8)
    assert (client.wrong, client.failed) == (0, 0)
    assert server.healthy()


def test_the_28_kinds_are_all_here(kinds: dict[str, list[Hostile]]) -> None:
    assert tuple(kinds) == NAMES and len(NAMES) == 28


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_ended_or_hung_the_engine_is_refused(
    server: Served, client: Client, kinds: dict[str, list[Hostile]], name: str
) -> None:
    for hostile in kinds[name]:
        answer = send(server.url, hostile)
        refused = answer.status in (400, 413) and answer.is_sentence
        gone = (hostile.leaves and answer.status == -2) or (name.startswith("rid") and answer.status == 200)
        assert refused or gone or (answer.status == 0 and len(hostile.body) > 1 << 20), (answer.status, answer.text)
    client.some(2)
    assert (client.wrong, client.failed) == (0, 0) and server.healthy()


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 500_000, 431),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: aaaaaaaa\r\n" * 9000 + b"\r\n", 431),
        (b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000000\r\n\r\n", 413),
        (
            b"POST /generate HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n%b\r\n" % (b" " * 65536) * 40,
            413,
        ),
        (b"NO REQUEST\r\n\r\n", 400),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_held(
    server: Served, client: Client, raw: bytes, status: int
) -> None:
    before = server.rss_mib
    answer = send(server.url, Hostile("raw", raw=raw))
    assert answer.status in (status, 0) and (not answer.status or answer.is_sentence), answer
    if len(raw) < 100_000:
        assert answer.status == status
    unharmed(server, client)
    assert server.rss_mib < before + 64


def test_half_requests_are_closed_and_others_are_served_meanwhile(server: Served, client: Client) -> None:
    """Half a header, and half a body; more of them than the server has connections for."""
    halves = (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n",
        b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{",
    )
    waiting = []
    for i in range(150):
        s = socket.create_connection(("127.0.0.1", server.port), 10)
        s.sendall(halves[i % 2])
        waiting.append(s)
    unharmed(server, client)
    closed = 0
    for s in waiting:
        s.settimeout(10)
        try:
            while part := s.recv(4096):
                assert part.startswith((b"HTTP/1.1 408", b"HTTP/1.1 503")), part
        except ConnectionError:
            pass
        closed += 1
        s.close()
    assert closed == 150
    unharmed(server, client)


def test_a_client_that_leaves_ends_its_own_samples_alone(server: Served, client: Client) -> None:
    """Its name is the beginning of others' names."""
    params = {"max_new_tokens": 110, "ignore_eos": True, "n": 4, "sampling_seed": 1}

    def body(rid: str) -> bytes:
        return json.dumps({"input_ids": [5, 9], "sampling_params": params, "rid": rid}).encode()

    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
        http.post("/pause_generation", json={"mode": "retract"})
        try:
            with pytest.raises(httpx.ReadTimeout):
                http.post("/generate", content=body("sample-1"), timeout=0.2)
            _until_waiting(http, 0)  # requests of disconnected clients are gone
            others = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(3)]
            for i, s in enumerate(others):
                content = body(f"sample-1{i}")
                s.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
            _until_waiting(http, 12)
        finally:
            http.post("/continue_generation", json={})
        for s in others:
            data = b""
            s.settimeout(120)
            while part := s.recv(65536):
                data += part
            replies = json.loads(data.partition(b"\r\n\r\n")[2])
            assert [(len(r["output_ids"]), r["meta_info"]["finish_reason"]["type"]) for r in replies] == [
                (110, "length")
            ] * 4
            s.close()


@pytest.mark.parametrize("second", [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", POST], ids=["whole", "half"])
def test_a_client_that_leaves_is_noticed_with_another_request_on_its_way(server: Served, second: bytes) -> None:
    content = json.dumps({"input_ids": [5, 9], "sampling_params": {"max_new_tokens": 9, "n": 4}}).encode()
    first = POST + b"Content-Length: %d\r\n\r\n" % len(content) + content
    with httpx.Client(base_url=server.url, timeout=120, trust_env=False) as http:
        http.post("/pause_generation", json={"mode": "retract"})
        try:
            for parts in ((first + second,), (first, second)):
                with socket.create_connection(("127.0.0.1", server.port), 10) as s:
                    for part in parts:
                        s.sendall(part)
                        _until_waiting(http, 4)
                _until_waiting(http, 0)
        finally:
            http.post("/continue_generation", json={})


def test_of_requests_without_a_wait_for_the_answer_the_first_is_answered(server: Served) -> None:
    """And the connection closed, so that the client asks for the others again."""
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    content = json.dumps({"input_ids": [5, 9], "sampling_params": {"max_new_tokens": 9}}).encode()
    first = POST + b"Content-Length: %d\r\n\r\n" % len(content) + content
    with socket.create_connection(("127.0.0.1", server.port), 10) as s:
        s.settimeout(120)
        s.sendall(first + ask + ask)
        data = b""
        while part := s.recv(65536):
            data += part
    head, _, answer = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200") and b"connection: close" in head.lower()
    assert len(json.loads(answer)["output_ids"]) <= 9


def _until_waiting(http: httpx.Client, samples: int) -> None:
    """120 s is a hang, on the slowest machine."""
    until = time.monotonic() + 120
    while (found := _waiting(http)) != samples and time.monotonic() < until:
        time.sleep(0.05)
    assert found == samples


def _waiting(http: httpx.Client) -> int:
    return int(http.get("/server_info").json()["internal_states"][0]["waiting"])


def test_the_log_stays_small(server: Served, client: Client) -> None:
    """However often a client vanishes or sends nonsense."""
    before = server.log.stat().st_size
    for _ in range(300):
        send(server.url, Hostile("garbage", raw=b"NO REQUEST\r\n\r\n"))
        send(
            server.url,
            Hostile("gone", raw=POST + b"Content-Length: 9\r\n\r\n{", leaves=True),
        )
    unharmed(server, client)
    text = server.log.read_text()
    assert "Traceback" not in text
    assert server.log.stat().st_size - before < 4096


def test_no_traceback_was_written_by_any_of_this(server: Served, tmp_path: Path) -> None:
    assert "Traceback" not in server.log.read_text()
