"""JSON posted to a server that others run, for rewards that are computed elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from miles_like.reward_config import EndpointConfig
from miles_like.server_url import tls
from miles_like.types import Unscored

_AGAIN = (408, 429)  # of the client's errors, those that are no mistake of the request


class Endpoint:
    """One server. Use it from one event loop; who asks it sets the time limit."""

    def __init__(self, config: EndpointConfig) -> None:
        self.url = config.url.rstrip("/")
        self._headers = {}
        if config.key_file is not None:
            try:
                self._headers["Authorization"] = f"Bearer {Path(config.key_file).read_text(encoding='utf-8').strip()}"
            except OSError as e:
                raise ValueError(f"key_file {config.key_file}: {e.strerror}; it holds the bearer token") from e
        self._http: httpx.AsyncClient | None = None

    async def post(self, path: str, body: object) -> Any | Unscored:
        """The reply's JSON. Unscored where no connection lasts, and for status 5xx, 408 and 429: that may pass.

        Raises ValueError for any other status, and for a reply that is no JSON: the request or the address is wrong.
        """
        if self._http is None:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._http = httpx.AsyncClient(
                timeout=None, limits=limits, trust_env=False, headers=self._headers, verify=tls(self.url)
            )
        where = self.url + path
        try:
            reply = await self._http.post(where, json=body)
        except httpx.TransportError as e:
            return Unscored(reason=f"no reply from {self.url}: {type(e).__name__}")
        if reply.status_code >= 500 or reply.status_code in _AGAIN:
            return Unscored(reason=f"HTTP {reply.status_code} from {self.url}")
        if reply.status_code != 200:
            raise ValueError(
                f"{where} answered HTTP {reply.status_code}: {reply.text[:200]!r}; check its url and options"
            )
        try:
            return reply.json()
        except ValueError as e:
            raise ValueError(f"{where} answered {reply.text[:200]!r}, which is no JSON: check its url") from e

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()
            self._http = None
