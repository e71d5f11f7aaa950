"""Alerts and incidents of a run, from the files that it writes when one happens."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import MIB, parse_json
from miles_like.page.samples import check_own, cut, own_text

ALERTS, INCIDENTS = "alerts.jsonl", "incidents"
ALERT_KEYS = ("step", "alert", "value", "threshold", "action")
SHOWN_ALERTS, SHOWN_INCIDENTS = 500, 50  # the last ones


def alerts(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of alerts.jsonl, the last first; lines that are no objects, as one cut short by a kill, are left out."""
    path = run_dir / ALERTS
    if not path.exists():
        return []
    found = []
    for line in own_text(path, run_dir, 64 * MIB).split("\n")[-SHOWN_ALERTS:]:
        with contextlib.suppress(ValueError):
            if isinstance(row := parse_json(line), dict):
                found.append({key: _cell(row.get(key)) for key in ALERT_KEYS})
    return found[::-1]


def _cell(value: object) -> object:
    return value if isinstance(value, int | float) and abs(value) < 1e100 else cut(value)


def incidents(run_dir: Path) -> list[dict[str, str]]:
    """`name` and `text` of incidents/*.md, the last first."""
    folder = run_dir / INCIDENTS
    if not check_own(folder, run_dir):
        return []
    files = sorted(folder.glob("*.md"), key=lambda p: (len(p.name), p.name))[-SHOWN_INCIDENTS:]
    return [{"name": path.name, "text": cut(own_text(path, run_dir, MIB))} for path in reversed(files)]
