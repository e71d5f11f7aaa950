"""Where a server is that others may have started: a URL that can be asked, and the certificates to ask it by.

Torch-free; httpx is imported where certificates are read.
"""

from __future__ import annotations

import functools
import ipaddress
import ssl
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator


def server_url(given: str) -> str:
    """`given`. Raises ValueError for what is no http:// or https:// URL with a host, and for one with a user name or a
    password, which configurations, reports and logs would hold."""
    try:
        parts = urlsplit(given)
        secret = "@" in parts.netloc
        found = bool(parts.hostname) and parts.port != 0  # a port that is no number raises
    except ValueError:
        found, secret = False, "@" in given
    if secret:
        where = given.rpartition("@")[2]
        raise ValueError(
            f"the URL of server {where!r} holds a user name or a password, which would be written to config.toml and "
            "reports: leave them out, and name a file with the bearer token by key_file"
        )
    if not (found and given.startswith(("http://", "https://"))):
        meant = "http://HOST:PORT or https://HOST:PORT" if "://" in given else f"'http://{given}' or 'https://{given}'"
        raise ValueError(f"{given!r} is no URL of a server: write {meant}")
    return given


def on_loopback(url: str) -> bool:
    """Whether a URL's host is this machine by its loopback interface."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


ServerUrl = Annotated[str, AfterValidator(server_url)]


def tls(*urls: str) -> ssl.SSLContext:
    """httpx's `verify` for these servers. Where one of them is https its certificate is held to the authorities that
    httpx knows, or to those of SSL_CERT_FILE; plain http needs none, and reading them takes 0.1 s."""
    return _context(any(url.startswith("https://") for url in urls))


@functools.cache
def _context(authorities: bool) -> ssl.SSLContext:
    if not authorities:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    import httpx

    return httpx.create_ssl_context()
