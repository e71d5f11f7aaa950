"""Watches the rows of a run: prints, posts and orders what alerts ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from miles_like.alerts.machine import Alerts, Event
from miles_like.alerts.rows import Row, kept_rows
from miles_like.alerts.signals import stalled_phase
from miles_like.alerts.webhook import Webhook
from miles_like.config.sections.watched.alerts import STRENGTH, AlertsConfig

ORDERS = ("pause", "stop", "rollback")  # actions that change what the run does


@dataclass(slots=True, kw_only=True)
class Watch:
    """A metric sink. A row that fires nothing changes nothing.

    run: name of the run, in messages. say: called with each event. ordered: called with an event whose action is one of
    ORDERS, in the event loop, between the row of a step and its boundary. lost: called with a sentence about messages
    that were not delivered.
    """

    config: AlertsConfig
    run: str
    say: Callable[[Event], None]
    ordered: Callable[[Event], None]
    lost: Callable[[str], None]
    webhook: Webhook | None = None  # None: nothing is posted
    alerts: Alerts = field(init=False)
    _reported: int = field(default=0, init=False)  # messages that the webhook has lost, and that were printed

    def __post_init__(self) -> None:
        self.alerts = Alerts(self.config)

    def restore(self, rows: Iterable[Row]) -> None:
        """Reads the rows before the checkpoint of a resume; nothing is printed, posted or ordered again."""
        for row in kept_rows(rows):
            self.alerts.read(row)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._act(self.alerts.read({"step": float(step), **metrics}))

    def phase(self, name: str, seconds: float) -> None:
        """Call now and then while a phase of a step goes on."""
        rule, rows = self.config.stall, self.alerts.rows
        reading = stalled_phase(rows, name, seconds, rule) if rows and rule.action != "off" else None
        if reading is not None and reading >= rule.threshold:
            event = self.alerts.note("stall", rule, reading, int(rows[-1]["step"]) + 1)
            self._act([] if event is None else [event])

    def close(self) -> None:
        if self.webhook is not None:
            self.webhook.close()
            self._report_losses(self.webhook)

    def _act(self, found: Iterable[Event]) -> None:
        found = list(found)
        for event in found:
            self.say(event)
            if self.webhook is not None and event.action != "log":
                self.webhook.send(message(event, self.run))
        if self.webhook is not None:
            self._report_losses(self.webhook)
        orders = [event for event in found if event.kind == "fired" and event.action in ORDERS]
        if orders:
            self.ordered(max(orders, key=lambda event: STRENGTH.index(event.action)))

    def _report_losses(self, webhook: Webhook) -> None:
        if webhook.failed > self._reported:
            lost, self._reported = webhook.failed - self._reported, webhook.failed
            self.lost(f"alerts: {lost} of the messages to the URL of alerts.webhook_variable are lost: {webhook.why}")


def message(event: Event, run: str) -> dict[str, str | int | float | None]:
    """What is posted. `text` is what chat services show."""
    return {
        "text": f"{run}: {event.sentence}",
        "run": run,
        "alert": event.alert,
        "kind": event.kind,
        "step": event.step,
        "since": event.since,
        "reading": event.reading if math.isfinite(event.reading) else None,
        "threshold": event.threshold,
        "action": event.action,
    }
