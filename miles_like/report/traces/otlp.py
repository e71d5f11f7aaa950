"""The same spans for a collector of OpenTelemetry (https://opentelemetry.io/docs/specs/otlp), over HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from miles_like import __version__
from miles_like.report.traces.parts import TracedSpan

TIMEOUT_S = 5  # of a request, its repetitions included
_BATCH = 512  # spans in a request


class OtlpExport:
    """Sends spans as those of the service `miles-like`, with an instance for each process. A run is one trace; a span's
    number follows from what it is, so that the same one that is sent twice is one."""

    def __init__(self, run_dir: Path, exporter: SpanExporter) -> None:
        self._run, self._exporter = str(run_dir.resolve()), exporter
        self._trace = _number(self._run, 16)
        self._scope = InstrumentationScope("miles_like", __version__)

    def send(self, found: Sequence[TracedSpan]) -> None:
        """Raises RuntimeError where the collector does not take them."""
        for i in range(0, len(found), _BATCH):
            if (
                self._exporter.export([self._readable(s) for s in found[i : i + _BATCH]])
                is not SpanExportResult.SUCCESS
            ):
                raise RuntimeError(f"the collector did not take {len(found) - i} of {len(found)} spans")

    def _readable(self, span: TracedSpan) -> ReadableSpan:
        instance = f"{span.process}.{span.pid}"
        number = _number(f"{instance} {span.name} {span.start} {span.took}", 8)
        known = {k: v if isinstance(v, bool | int | float | str) else _texts(v) for k, v in span.args.items()}
        return ReadableSpan(
            name=span.name,
            context=SpanContext(self._trace, number, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED)),
            resource=Resource(
                {"service.name": "miles-like", "service.instance.id": instance, "miles_like.run": self._run}
            ),
            attributes=known,
            start_time=span.start,
            end_time=span.end,
            instrumentation_scope=self._scope,
        )


def otlp_export(run_dir: Path, endpoint: str) -> OtlpExport:
    """endpoint: as http://HOST:4318/v1/traces. Headers of the collector are those of OTEL_EXPORTER_OTLP_HEADERS."""
    return OtlpExport(run_dir, OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S))


def _texts(value: object) -> list[str] | str:
    return [str(one) for one in value] if isinstance(value, list | tuple) else str(value)


def _number(text: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size], "big") or 1
