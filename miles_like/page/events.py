"""Alerts of a run, computed from its rows, and incidents, from the files that it writes when one happens."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miles_like.alerts.machine import Alerts
from miles_like.alerts.rows import ROLLBACK
from miles_like.config.sections.watched.alerts import AlertsConfig
from miles_like.limits.regular_files import MIB
from miles_like.page.curves import short
from miles_like.page.samples import check_own, cut, own_text

INCIDENTS = "incidents"
SHOWN_ALERTS, SHOWN_INCIDENTS = 500, 50  # the last ones


class RunAlerts:
    """The alerts that have fired over the rows read so far, by the rules in the configuration of the run.

    config: text of its config.toml; None: it has none, and the rules are those of the defaults. Where its [alerts]
    cannot be read, `why` says so and no alert is found.
    """

    def __init__(self, config: str | None) -> None:
        self._alerts: Alerts | None = None
        self._found: list[dict[str, Any]] = []
        self.why: str | None = None
        try:
            self._alerts = Alerts(AlertsConfig.model_validate(tomllib.loads(config or "").get("alerts", {})))
        except ValidationError as e:
            first = e.errors()[0]
            self.why = _unread(f"{'.'.join(map(str, ('alerts', *first['loc'])))}: {first['msg']}")
        except (tomllib.TOMLDecodeError, RecursionError) as e:
            self.why = _unread(str(e))

    def read(self, row: Mapping[str, float]) -> None:
        """The next row. One of the same step as the last adds to it. Alerts of steps that the run gives up are over."""
        for one in self._found if ROLLBACK in row else ():
            one["over"] = int(row["step"]) if one["over"] is None else one["over"]
        for event in () if self._alerts is None else self._alerts.read(row):
            if event.kind == "fired":
                value, threshold = short(event.reading), short(event.threshold)
                self._found.append(
                    {"step": event.step, "alert": event.alert, "value": value, "threshold": threshold}
                    | {"action": event.action, "over": None}
                )
            else:
                next(one for one in reversed(self._found) if one["alert"] == event.alert)["over"] = event.step

    def table(self) -> list[dict[str, Any]]:
        """`step`, `alert`, `value`, `threshold`, `action` and `over` (the step at which it was over, or None) of the
        last ones, the last first."""
        return self._found[: -SHOWN_ALERTS - 1 : -1]


def _unread(reason: str) -> str:
    return f"No alert is shown: [alerts] of config.toml cannot be read ({cut(reason)})"


def incidents(run_dir: Path) -> list[dict[str, str]]:
    """`name` and `text` of incidents/*.md, the last first."""
    folder = run_dir / INCIDENTS
    if not check_own(folder, run_dir):
        return []
    files = sorted(folder.glob("*.md"), key=lambda p: (len(p.name), p.name))[-SHOWN_INCIDENTS:]
    return [{"name": path.name, "text": cut(own_text(path, run_dir, MIB))} for path in reversed(files)]
