"""Packages of the services that a run is shown in."""

from __future__ import annotations

from importlib.util import find_spec

from miles_like.config.sections.watched.tracing import TraceConfig
from miles_like.config.sections.watched.trackers import TrackersConfig

_OTLP = "opentelemetry.exporter.otlp.proto.http"


def check_packages(trackers: TrackersConfig, trace: TraceConfig) -> None:
    """Raises ValueError naming the first package that is not installed, and the extra that has it."""
    for name in trackers.use:
        if not _has(name):
            raise ValueError(
                f"trackers.use has {name!r}, whose package is not installed: pip install 'miles-like[{name}]', or "
                "remove it"
            )
    if trace.otlp is not None and not _has(_OTLP):
        raise ValueError(
            f"trace.otlp = {trace.otlp!r} needs a package that is not installed: pip install 'miles-like[otel]', or "
            "remove it"
        )


def _has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package around it
        return False
