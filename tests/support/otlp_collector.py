"""A collector of OpenTelemetry: OTLP/HTTP's requests, read by the protocol's own messages (opentelemetry-proto)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received(NamedTuple):
    """A span, with the instance of the service that it is of. Times in nanoseconds."""

    instance: str
    name: str
    start: int
    end: int
    trace: bytes
    number: bytes
    attributes: dict[str, Any]


class Collector:
    """status: of its answers."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.headers: list[dict[str, str]] = []
        self.status, self.url = 200, ""

    def take(self, request: ExportTraceServiceRequest) -> None:
        for of in request.resource_spans:
            about = {a.key: _value(a.value) for a in of.resource.attributes}
            assert about["service.name"] == "miles-like"
            for scope in of.scope_spans:
                self.spans += [
                    Received(
                        about["service.instance.id"],
                        span.name,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.trace_id,
                        span.span_id,
                        {a.key: _value(a.value) for a in span.attributes},
                    )
                    for span in scope.spans
                ]


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    """One on loopback, at `url`."""
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            right = (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            found.headers.append({key.lower(): value for key, value in self.headers.items()})
            if right and found.status == 200:
                found.take(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(found.status if right else 400)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
