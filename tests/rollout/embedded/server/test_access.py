"""Law: a rollout server answers the run that holds its key, and other clients only about its health.

The application behind the door is a stand-in that records which paths came through; keys reach real processes through
`rollout.guard`, as servers' do.
"""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rollout.config import PublishConfig
from rollout.embedded.server import app as server
from rollout.embedded.server.access import Access, check_address
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from rollout.server_key import VARIABLE, ServerKey, given_key, read_key, sglang_key_file
from rollout.sglang import servers
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.sglang.ports import free_port
from rollout.wire import endpoints
from tests.support.fakes import wait_until
from tests.support.refusals import check_refusal, refuses

KEY = ServerKey("sampling-" + "a" * 20, "control-" + "b" * 20)
PATHS = {n: v for n, v in vars(endpoints).items() if n.isupper() and isinstance(v, str) and v.startswith("/")}


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["path"].encode()})


def asked(
    path: str, headers: dict[str, str], *, host: str = "127.0.0.1", key: ServerKey | None = KEY, method: str = "POST"
) -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=Access(inner, host=host, address=host, key=key))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as http:
            return await http.request(method, path, headers=headers)

    return asyncio.run(ask())


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


@pytest.mark.parametrize("path", sorted(PATHS.values()))
def test_every_path_but_health_wants_the_key_that_is_its_own(path: str) -> None:
    """The second of the two wherever SGLang 0.5.23 asks for its admin key, the first elsewhere."""
    sampling = path in ("/generate", "/model_info", "/server_info") or path.startswith("/v1/")
    right, wrong = (KEY.sampling, KEY.control) if sampling else (KEY.control, KEY.sampling)
    open_ = path == "/health"
    assert asked(path, {}).status_code == (200 if open_ else 401)
    assert asked(path, bearer(right)).status_code == 200
    for given in (bearer(wrong), bearer(right[:-1]), bearer(right + "x"), bearer(""), {"Authorization": right},
                  {"Authorization": f"Basic {right}"}):  # fmt: skip
        assert asked(path, given).status_code == (200 if open_ else 401), given
    assert asked(path, KEY.headers(path + "?timeout=5")).status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/docs", "/openapi.json", "/nothing", "/Health", "/health/", "/health ", "/x/health", "/health_generate"],
)
def test_every_other_path_wants_a_key_too(path: str) -> None:
    assert asked(path, {}).status_code == 401


@pytest.mark.parametrize(
    ("bound", "host", "status"),
    [
        ("127.0.0.1", "evil.example", 403),
        ("127.0.0.1", "127.0.0.1.evil.example:8000", 403),
        ("127.0.0.1", "10.0.0.7:8000", 403),
        ("127.0.0.1", "", 403),
        ("127.0.0.1", "localhost:8000", 200),
        ("127.0.0.1", "LOCALHOST", 200),
        ("127.0.0.1", "[::1]:8000", 200),
        ("::1", "[::1]:8000", 200),
        ("0.0.0.0", "10.0.0.7:8000", 200),
        ("0.0.0.0", "evil.example", 403),
    ],
)
def test_the_host_is_the_server_s(bound: str, host: str, status: int) -> None:
    """A page whose name was made to resolve to this address sends its own name."""
    assert asked("/generate", {"Host": host, **bearer(KEY.sampling)}, host=bound).status_code == status


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:8000", "null"])
def test_a_page_in_a_browser_is_refused_whatever_it_knows(origin: str) -> None:
    for key in (KEY, None):
        answer = asked("/pause_generation", {"Origin": origin, **bearer(KEY.control)}, key=key)
        assert answer.status_code == 403 and "Origin" in answer.json()["error"]["message"]


def test_without_a_key_loopback_is_served_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked("/generate", {}, key=None).status_code == 200
    for address in ("127.0.0.1", "127.0.0.2", "::1"):
        check_address(address, None)
    for address in ("0.0.0.0", "::", "192.0.2.7", "fe80::1%eth0"):
        check_address(address, KEY)
        with refuses(ValueError, address, VARIABLE, "--key-file"):
            check_address(address, None)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert server.main(["--model-path", "none", "--port", str(free_port()), "--host", "0.0.0.0"]) == 1
    check_refusal(capsys.readouterr().err, "0.0.0.0", VARIABLE, "--key-file")


def test_a_key_is_read_from_files_that_others_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_text(f"{KEY.sampling}\n{KEY.control}\n")
    path.chmod(0o600)
    assert read_key(path) == KEY and KEY.sampling not in repr(KEY) and KEY.control not in repr(KEY)
    path.write_text(KEY.sampling + "\n")
    assert read_key(path) == ServerKey(KEY.sampling, KEY.sampling)
    path.chmod(0o640)
    with refuses(ValueError, 640, 600):
        read_key(path)
    path.chmod(0o600)
    for text in ("", "short", "three of them " * 3, "é" * 20):
        path.write_text(text)
        with refuses(ValueError, path, 16, 512, "ASCII"):
            read_key(path)
    with refuses(ValueError, tmp_path / "none"):
        read_key(tmp_path / "none")
    with refuses(ValueError, tmp_path):
        tmp_path.chmod(0o700)
        read_key(tmp_path)
    monkeypatch.setenv(VARIABLE, KEY.text)
    assert given_key(None) == KEY
    assert VARIABLE not in os.environ and given_key(None) is None


def test_sglang_s_file_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = sglang_key_file(KEY)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.suffix == ".yaml"
    assert yaml.safe_load(path.read_text()) == {"api-key": KEY.sampling, "admin-api-key": KEY.control}


TALKS = f"""
import http.server, os, sys
key = os.environ["{VARIABLE}"]
print("server_args: api_key=%s admin=%s" % tuple(key.split()), flush=True)
print("x" * 3_000_000 + key, flush=True)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


@pytest.mark.slow
def test_a_server_that_logs_its_key_does_not_log_it(tmp_path: Path) -> None:
    """Handed over by environment, not by command line; the file that SGLang reads is gone once the server answers."""
    log, file = tmp_path / "server.log", tmp_path / "key.yaml"
    file.touch()
    port = free_port()
    command = [sys.executable, "-c", TALKS, str(port)]
    with servers.start(command, url=f"http://127.0.0.1:{port}", log=log, key=KEY, key_file=file) as handle:
        handle.await_ready(60)
        assert not file.exists()
        assert wait_until(lambda: log.stat().st_size > 3_000_000, 20)
        logged = log.read_text()
        assert "api_key=<server key> admin=<server key>" in logged
        assert KEY.sampling not in logged and KEY.control not in logged
        arguments = Path(f"/proc/{handle.pid}/cmdline").read_bytes()
        assert KEY.sampling.encode() not in arguments and KEY.control.encode() not in arguments
    file.touch()
    handle = servers.start([sys.executable, "-c", "1/0"], url="http://x", log=log, key=KEY, key_file=file)
    assert wait_until(lambda: not handle.alive(), 30)
    assert "ZeroDivisionError" in log.read_text()  # what it wrote last is there too
    handle.stop()
    assert not file.exists()


@pytest.fixture
def door() -> Iterator[str]:
    """A real server of the stand-in application."""
    import socket
    import threading

    import uvicorn

    async def application(scope: Any, receive: Any, send: Any) -> None:
        body = b'{"success": true, "model_path": "m", "weight_version": "3"}'
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": body})

    with socket.create_server(("127.0.0.1", 0)) as s:
        app = Access(application, host="127.0.0.1", address="127.0.0.1", key=KEY)
        web = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=web.run, kwargs={"sockets": [s]}, daemon=True)
        thread.start()
        assert wait_until(lambda: web.started, 20)
        yield f"http://127.0.0.1:{s.getsockname()[1]}"
        web.should_exit = True
        thread.join(10)


def test_clients_and_publishers_carry_the_key_of_each_path(door: str) -> None:
    async def ask(key: ServerKey | None) -> None:
        client = SGLangClient(door, routing=None, key=key)
        try:
            assert await client.health()
            assert await client.weight_version() == 3
            await client.pause()
            await client.flush_cache()
        finally:
            await client.close()

    asyncio.run(ask(KEY))
    for wrong in (None, ServerKey.new()):
        with refuses(RolloutError, "HTTP", 401, VARIABLE):
            asyncio.run(ask(wrong))
    for key, fails in ((KEY, False), (None, True)):
        found = ServerSet([door], 5.0, key)
        if fails:
            with refuses(RolloutError, "HTTP", 401):
                found.ask(endpoints.PAUSE, {})
        else:
            found.change(endpoints.BEGIN_UPDATE, {})
        found.close()
    publisher = TensorPublisher(
        PublishTarget(urls=(door,), kind="embedded", spec=None, config=PublishConfig(), key=KEY), send=True
    )
    assert KEY.sampling not in repr(vars(publisher))
