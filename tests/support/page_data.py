"""What a written page has of a run, and runs that are made for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles_like.report.sinks import JsonlSink


def page_data(text: str) -> dict[str, Any]:
    """The `data` of a page, and its `samples`, a list with a run's each."""
    blocks = re.findall(r'<script type="application/json" id="(\w+)">(.*?)</script>', text, re.DOTALL)
    found = {name: json.loads(block) for name, block in blocks}
    return {**found["data"], "samples": found["samples"]}


def write_rows(run_dir: Path, rows: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    """Appends rows to metrics.jsonl, as a run does."""
    run_dir.mkdir(exist_ok=True)
    sink = JsonlSink(run_dir / "metrics.jsonl")
    for step, row in rows:
        sink.write(step, row)
    sink.close()
