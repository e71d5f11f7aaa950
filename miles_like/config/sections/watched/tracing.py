"""Which traces and profiles a run writes. Torch-free."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from miles_like.section import Section

_STEPS = re.compile(r"(\d+)(?::(\d+))?")


class TraceConfig(Section):
    """Traces of every process, and profiles of chosen ranks (docs/tracing.md)."""

    on: bool = False  # write `traces/` of the run directory
    window: int = Field(10, ge=1)  # steps in one file
    # address to which the same spans are sent by OpenTelemetry's protocol over HTTP, as http://HOST:4318/v1/traces
    otlp: str | None = None
    profile_steps: str | None = None  # FIRST:LAST or STEP: these steps are profiled by torch.profiler; None: none
    profile_ranks: tuple[int, ...] = (0,)  # trainer ranks that are profiled

    @property
    def profiled(self) -> range:
        """The steps that are profiled; empty: none."""
        if self.profile_steps is None:
            return range(0)
        found = _STEPS.fullmatch(self.profile_steps)
        assert found is not None, "checked when the section was read"
        first, last = int(found[1]), int(found[2] or found[1])
        return range(first, last + 1)

    def check_ranks(self, world_size: int) -> None:
        """Raises ValueError for a rank that the trainer does not have."""
        most = max(self.profile_ranks, default=0)
        if self.profile_steps is not None and most >= world_size:
            raise ValueError(
                f"trace.profile_ranks has {most}, but the trainer's ranks are 0 to {world_size - 1}: choose among them"
            )

    @model_validator(mode="after")
    def steps_can_be_read(self) -> TraceConfig:
        if self.profile_steps is not None and (
            _STEPS.fullmatch(self.profile_steps) is None or not self.profiled or not self.profiled.start
        ):
            raise ValueError(
                f"trace.profile_steps = {self.profile_steps!r} is not FIRST:LAST with 1 <= FIRST <= LAST: set it to, "
                "for example, '3:5', the third to the fifth step"
            )
        if wrong := [rank for rank in self.profile_ranks if rank < 0]:
            raise ValueError(f"trace.profile_ranks has {wrong[0]}: ranks are counted from 0")
        if self.otlp is not None and "@" in urlsplit(self.otlp).netloc:
            raise ValueError(
                "trace.otlp has a user or password, which would be written to the run directory: remove them, and "
                "export OTEL_EXPORTER_OTLP_HEADERS"
            )
        if self.otlp is not None and not self.on:
            raise ValueError(f"trace.otlp = {self.otlp!r} has no effect with trace.on = false: set trace.on = true")
        return self
