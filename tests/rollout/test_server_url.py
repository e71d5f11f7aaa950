"""Servers by URL: one over https is held to the authorities that are trusted, one over http costs no reading of them.

The https server is on loopback, its certificate made here by openssl and signed by itself, so that SSL_CERT_FILE alone
can make it trusted. Not covered: the authorities that httpx comes with, which sign nothing on this machine.
"""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from miles_like.config.sections.reward import RemoteConfig
from miles_like.rewards.judges.http import Endpoint
from miles_like.types import Unscored
from rollout.publish.servers import ServerSet
from rollout.server_url import _context, server_url, tls
from rollout.sglang.client import SGLangClient
from rollout.sglang.http_replies import RolloutError
from rollout.wire import endpoints
from tests.support.fakes import FakeServer
from tests.support.refusals import refuses


@pytest.fixture(autouse=True)
def authorities_are_httpx_s_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    _context.cache_clear()
    yield
    _context.cache_clear()


@pytest.mark.parametrize("url", ["http://h", "https://h:1/path", "http://10.0.0.7:30000/", "http://[::1]:3"])
def test_a_url_is_taken_as_it_is(url: str) -> None:
    assert server_url(url) == url


@pytest.mark.parametrize("url", ["", "h", "localhost:3000", "//h:1", "ws://h:1", "http://", "http://:1", "http://h:x"])
def test_what_is_none_is_refused(url: str) -> None:
    with refuses(ValueError, repr(url)):
        server_url(url)


def test_authorities_are_read_for_https_alone() -> None:
    plain, checked = tls("http://a", "http://b"), tls("http://a", "https://b")
    assert not plain.get_ca_certs() and checked.get_ca_certs()
    assert plain is tls("http://c") and checked is tls("https://c")  # and once
    assert all(c.verify_mode is ssl.CERT_REQUIRED and c.check_hostname for c in (plain, checked))


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    out = tmp_path / "both.pem"
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", tmp_path / "key.pem"]
    name = ["-subj", "/CN=here", "-addext", "subjectAltName=IP:127.0.0.1", "-out", tmp_path / "own.pem"]
    subprocess.run(["openssl", "req", "-x509", "-days", "2", *key, *name], check=True, capture_output=True)
    out.write_text((tmp_path / "key.pem").read_text() + (tmp_path / "own.pem").read_text())
    return out


async def version(url: str) -> int:
    client = SGLangClient(url, routing=None, request_timeout_s=5)
    try:
        return await client.weight_version()
    finally:
        await client.close()


async def scored(url: str) -> object:
    endpoint = Endpoint(RemoteConfig(url=url))
    try:
        return await endpoint.post(endpoints.CHECKSUM, {"action": "checksum"})
    finally:
        await endpoint.close()


def test_a_server_over_https(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(version="7", certificate=certificate) as server, FakeServer() as plain:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert server.url.startswith("https://") and asyncio.run(version(server.url)) == 7
        assert not isinstance(asyncio.run(scored(server.url)), Unscored)
        servers = ServerSet([plain.url, server.url], timeout_s=5)
        assert len(servers.checksums()) == 2
        servers.close()


def test_one_that_is_not_trusted_is_refused_with_the_remedy(certificate: Path) -> None:
    with FakeServer(certificate=certificate) as server, FakeServer() as plain:
        with refuses(RolloutError, server.url, "TLS", "SSL_CERT_FILE"):
            asyncio.run(version(server.url))
        assert isinstance(asyncio.run(scored(server.url)), Unscored) and not server.calls
        with refuses(RolloutError, "TLS", "http://", "URL"):
            asyncio.run(version(plain.url.replace("http", "https")))
