"""Checks of a server's URL, and the TLS context for requests to it.

Torch-free. httpx is imported only when certificates are read.
"""

from __future__ import annotations

import functools
import ipaddress
import ssl
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator


def server_url(given: str) -> str:
    """Return `given`. Raises ValueError unless it is an http:// or https:// URL with a host, and for a URL with a user
    name or password, which configurations, reports and logs would contain."""
    try:
        parts = urlsplit(given)
        secret = "@" in parts.netloc
        found = bool(parts.hostname) and parts.port != 0  # .port raises unless it is a number
    except ValueError:
        found, secret = False, "@" in given
    if secret:
        where = given.rpartition("@")[2]
        raise ValueError(
            f"the URL of server {where!r} contains a user name or a password, which would be written to config.toml "
            "and reports: remove them, and set key_file to a file with the bearer token"
        )
    if not (found and given.startswith(("http://", "https://"))):
        meant = "http://HOST:PORT or https://HOST:PORT" if "://" in given else f"'http://{given}' or 'https://{given}'"
        raise ValueError(f"{given!r} is not the URL of a server: write {meant}")
    return given


def on_loopback(url: str) -> bool:
    """Whether the host of a URL is the loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


ServerUrl = Annotated[str, AfterValidator(server_url)]


def tls(*urls: str) -> ssl.SSLContext:
    """The `verify` argument of httpx for these servers. With an https URL it holds httpx's certificate authorities, or
    those of SSL_CERT_FILE. Without one they are not read, which saves 0.1 s."""
    return _context(any(url.startswith("https://") for url in urls))


@functools.cache
def _context(authorities: bool) -> ssl.SSLContext:
    if not authorities:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    import httpx

    return httpx.create_ssl_context()
