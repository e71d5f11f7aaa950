"""What the page shows of a run, as JSON, from the files of its directory."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from miles_like.checkpoint.ledger_audit import audit
from miles_like.config.sections.watched.metric_direction import better
from miles_like.limits.regular_files import MIB, check_inside
from miles_like.page.curves import Rises, Rows, columns, curve, gantt, layer_grid, running_means, short
from miles_like.page.evaluations import standard_errors
from miles_like.page.events import RunAlerts, incidents
from miles_like.page.panels import SMOOTHED
from miles_like.page.samples import Kept, check_own, cut, histograms, kept_samples, own_text
from miles_like.page.words import words_of
from miles_like.report.console import headline_keys
from miles_like.report.health import warnings
from miles_like.report.provenance import starts

CONFIG = "config.toml"
CONFIG_BYTES = 16 * MIB
WARNING_ROWS = 2000  # last steps, of which warnings are


def run_data(run_dir: Path, rows: Rows, alerts: RunAlerts | None = None) -> dict[str, Any]:
    """Everything but the samples. alerts: after the rows; None: they are computed here. Raises ValueError naming a file
    that is damaged, or leads out of the directory."""
    rises = Rises()
    found = columns([rises.row(row) for row in rows])
    text = config_text(run_dir)
    alerts = alerts or alerts_of(text, rows)
    return {
        "name": cut(run_dir.resolve().name),
        "steps": train_setting(text, "steps"),
        "last": row_figures(rows[-1]),
        "curves": {key: curve(*of) for key, of in found.items()},
        "means": {key: running_means(found[key][1]) for key in SMOOTHED if key in found},
        "errors": standard_errors(run_dir),
        "layers": layer_grid(rows, found),
        "gantt": gantt(rows),
        "figures": found_figures(rows).table(),
        "warnings": warning_texts(rows, alerts),
        "ledger": ledger(run_dir),
        "alerts": alerts.table(),
        "incidents": incidents(run_dir),
        "starts": _starts(run_dir),
        "config": text,
    }


def sample_data(run_dir: Path) -> dict[str, Any]:
    """The samples, their worst, and the distribution of rewards. Raises ValueError as `kept_samples`."""
    folder = run_dir / "rollouts"
    every = train_setting(config_text(run_dir), "token_logprobs_every") or 0
    kept = kept_samples(run_dir, words_of(run_dir), every) if check_own(folder, run_dir) else Kept()
    return {
        "samples": kept.samples,
        "worst": kept.worst,
        "rewards": histograms(kept.rewards),
        "ratios": kept.ratios,
        "steps": sorted(kept.rewards),
        "left_out": kept.left_out,
    }


def alerts_of(config: str | None, rows: Rows) -> RunAlerts:
    found = RunAlerts(config)
    for row in rows:
        found.read(row)
    return found


def warning_texts(rows: Rows, alerts: RunAlerts) -> list[str]:
    """Of the last rows."""
    return [*([alerts.why] if alerts.why else []), *warnings(rows[-WARNING_ROWS:]).values()]


def row_figures(row: Mapping[str, float]) -> dict[str, float]:
    """The finite values of a row."""
    return {key: short(value) for key, value in row.items() if math.isfinite(value)}


def found_figures(rows: Rows) -> Figures:
    figures = Figures()
    for row in rows:
        figures.add(row)
    return figures


class Figures:
    """First, last and best value of each metric, row by row."""

    def __init__(self) -> None:
        self._of: dict[str, list[Any]] = {}  # metric -> [first, last, best or None, direction]

    def add(self, row: Mapping[str, float]) -> None:
        for key, value in row.items():
            if key == "step" or not math.isfinite(value):
                continue
            if (of := self._of.get(key)) is None:
                sign = better(key)
                self._of[key] = [value, value, value if sign else None, sign]
            else:
                of[1] = value
                if of[3]:
                    of[2] = max(of[2], value) if of[3] > 0 else min(of[2], value)

    def table(self) -> list[list[Any]]:
        """[metric, first, last, best or None, whether it is one of the main ones], the main ones first."""
        main = headline_keys([dict.fromkeys(self._of, 0.0)])
        rows = ((key, self._of[key]) for key in dict.fromkeys([*main, *self._of]))
        return [[key, *(None if v is None else short(v) for v in of[:3]), key in main] for key, of in rows]


def ledger(run_dir: Path) -> dict[str, Any] | None:
    """`wrong`, `unfinished`, `totals` (of the last step) and `reasons`; None without a ledger."""
    path = run_dir / "ledger.jsonl"
    if not path.exists():  # a run without a rollout has none
        return None
    check_inside(path, run_dir)
    found = audit(path)
    last = dataclasses.asdict(found.steps[-1]) if found.steps else None
    reasons = [[cut(reason), n] for reason, n in found.reasons.items()]
    return {"wrong": found.wrong, "unfinished": found.unfinished, "totals": last, "reasons": reasons}


def train_setting(config: str | None, key: str) -> int | None:
    """The key of [train] in the configuration's text; None where it has no such number above 0."""
    try:
        found = tomllib.loads(config or "").get("train", {}).get(key)
    except (tomllib.TOMLDecodeError, RecursionError, AttributeError):
        return None
    return found if type(found) is int and 0 < found < 1 << 53 else None


def config_text(run_dir: Path) -> str | None:
    path = run_dir / CONFIG
    return own_text(path, run_dir, CONFIG_BYTES) if path.exists() else None


def _starts(run_dir: Path) -> list[Sequence[str]]:
    """Date, host, command, commit and versions of each start."""
    out: list[Sequence[str]] = []
    for one in starts(run_dir):
        versions = one.get("versions")
        names = versions.items() if isinstance(versions, dict) else ()
        cells = [cut(one.get(key)) for key in ("started", "host", "command")]
        out.append([*cells, cut(one.get("commit"))[:12], ", ".join(cut(f"{name} {v}") for name, v in names)])
    return out
