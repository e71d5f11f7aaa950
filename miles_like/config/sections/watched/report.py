"""Settings of what a run reports. Torch-free."""

from __future__ import annotations

from typing import Literal, TypeAlias

from miles_like.section import Section

OtherNames: TypeAlias = Literal["verl", "slime"]


class ReportConfig(Section):
    # frameworks under whose names metrics are written too, beside their own ones (docs/metrics.md)
    aliases: tuple[OtherNames, ...] = ()
