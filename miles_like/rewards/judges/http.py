"""Posts JSON to an external server, for rewards that are computed there."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import httpx

from miles_like.config.sections.reward import EndpointConfig
from miles_like.limits.regular_files import read_text
from miles_like.types import Unscored
from rollout.server_url import tls

KEY_BYTES = 1 << 16  # largest file with a token that is read
REPLY_BYTES = 1 << 20  # largest reply, decompressed; a reward is a few numbers
_RETRYABLE = (408, 429)  # client errors that do not mean a wrong request


class Endpoint:
    """One server, for use from one event loop. The caller sets the time limit."""

    def __init__(self, config: EndpointConfig) -> None:
        self.url = config.url.rstrip("/")
        # do not request compressed replies: one of 600 KiB can expand to 1.4 GiB
        self._headers = {"Accept-Encoding": "identity"}
        if config.key_file is not None:
            try:
                self._headers["Authorization"] = f"Bearer {read_text(Path(config.key_file), KEY_BYTES).strip()}"
            except OSError as e:
                raise ValueError(f"key_file {config.key_file}: {e.strerror}; it must contain the bearer token") from e
        self._http: httpx.AsyncClient | None = None

    async def post(self, path: str, body: object) -> Any | Unscored:
        """The reply's JSON. Unscored for a connection error and for status 5xx, 408 and 429, which may be temporary.

        Raises ValueError for any other status, for a reply of more than REPLY_BYTES decompressed, and for a reply that
        is not JSON: the request or the address is wrong.
        """
        if self._http is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._http = httpx.AsyncClient(
                timeout=None, limits=limits, trust_env=False, headers=self._headers, verify=tls(self.url)
            )
        where = self.url + path
        try:
            async with self._http.stream("POST", where, json=body) as reply:
                if reply.status_code >= 500 or reply.status_code in _RETRYABLE:
                    return Unscored(reason=f"HTTP {reply.status_code} from {self.url}", away=True)
                text = await _bounded(reply, where)
        except httpx.TransportError as e:
            return Unscored(reason=f"no reply from {self.url}: {type(e).__name__}", away=True)
        start = text[:800].decode("utf-8", "replace")[:200]
        if reply.status_code != 200:
            raise ValueError(f"{where} replied HTTP {reply.status_code}: {start!r}; check url and options")
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as e:
            raise ValueError(f"{where} replied {start!r}, which is not JSON: check url") from e

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None


async def _bounded(reply: httpx.Response, where: str) -> bytes:
    """The reply's body, decompressed. Raises ValueError for more than REPLY_BYTES, and for compressions other than gzip
    and deflate, whose decompressed size can be bounded."""
    coding = reply.headers.get("Content-Encoding", "identity").strip().lower()
    if coding not in ("identity", "gzip", "deflate"):
        raise ValueError(f"{where} replied with Content-Encoding {coding[:40]!r}, which was not requested")
    inflate = None if coding == "identity" else zlib.decompressobj(zlib.MAX_WBITS | 32)
    out = bytearray()
    async for chunk in reply.aiter_raw():
        left = REPLY_BYTES + 1 - len(out)
        try:
            out += chunk[:left] if inflate is None else inflate.decompress(chunk, left)
        except zlib.error as e:
            raise ValueError(f"{where} replied with damaged {coding}: {e}") from e
        if len(out) > REPLY_BYTES:
            raise ValueError(f"{where} replied with more than {REPLY_BYTES:,} bytes: check url and options")
    return bytes(out)
