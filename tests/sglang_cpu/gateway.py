"""A gateway in front of a server, which passes everything on and changes requests or replies to /generate."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import httpx

Change = Callable[[Any], None]  # of a parsed body, in place
TIMEOUT_S = 120.0


@contextlib.contextmanager
def gateway(url: str, *, request: Change | None = None, reply: Change | None = None) -> Iterator[str]:
    """Its own URL. Both changes are of samplings only: requests that score (0 new tokens) pass as they are."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass(b"")

        def do_POST(self) -> None:
            self._pass(self.rfile.read(int(self.headers.get("content-length", 0))))

        def _pass(self, body: bytes) -> None:
            sampled = self.path == "/generate" and _samples(json.loads(body))
            if sampled and request is not None:
                body = _changed(body, request)
            response = httpx.request(
                self.command,
                url + self.path,
                content=body,
                headers={"content-type": "application/json"},
                timeout=TIMEOUT_S,
                trust_env=False,
            )
            content = _changed(response.content, reply) if sampled and reply is not None else response.content
            self.send_response(response.status_code)
            self.send_header("content-type", response.headers.get("content-type", "application/json"))
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def _samples(request: Any) -> bool:
    params = request["sampling_params"]
    first = params[0] if isinstance(params, list) else params
    return bool(first["max_new_tokens"])


def _changed(body: bytes, change: Change) -> bytes:
    parsed = json.loads(body)
    change(parsed)
    return json.dumps(parsed).encode()
