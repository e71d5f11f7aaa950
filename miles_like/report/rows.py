"""A step's metrics as a line of JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

NON_FINITE = "nonfinite_count"


def json_row(step: int, metrics: Mapping[str, float]) -> str:
    """JSON has no nan or infinity: such values are null, and `nonfinite_count` is their number."""
    row: dict[str, float | None] = {"step": step}
    row |= {k: v if math.isfinite(v) else None for k, v in metrics.items()}
    bad = sum(v is None for v in row.values())
    if bad:
        row[NON_FINITE] = bad
    return json.dumps(row, allow_nan=False)
