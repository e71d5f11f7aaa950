"""The alerts of a life of a run, and what they order."""

from __future__ import annotations

import json
from typing import NamedTuple

from rich.console import Console

from miles_like.alerts.machine import Event
from miles_like.alerts.watch import Watch
from miles_like.alerts.webhook import Webhook
from miles_like.config.sections.watched.alerts import AlertsConfig
from miles_like.report.console import JsonLines, note
from miles_like.run.setup.trainer_side import RunFiles
from miles_like.run.watched.orders import Orders
from miles_like.stopping import StopRequest
from miles_like.variables import inherited


class Watched(NamedTuple):
    watch: Watch
    orders: Orders


def run_watch(files: RunFiles, stop: StopRequest, console: Console) -> Watched:
    """In their state after the rows before the checkpoint of a resume. Raises ValueError as `webhook_of`."""

    def say(text: str) -> None:
        note(console, text)

    plan = files.plan
    orders = Orders(run_dir=plan.run_dir, stop=stop, best=files.best, say=say, fence=plan.fence)
    watch = Watch(
        config=plan.config.alerts,
        run=plan.run_dir.resolve().name,
        say=lambda event: _print(console, event),
        ordered=orders.ordered,
        lost=say,
        webhook=webhook_of(plan.config.alerts),
    )
    orders.rows = lambda: watch.alerts.rows
    watch.restore(files.earlier)
    return Watched(watch, orders)


def webhook_of(config: AlertsConfig) -> Webhook | None:
    """None: alerts are not posted. Raises ValueError where the variable is not set."""
    if (name := config.webhook_variable) is None:
        return None
    if not (url := inherited().get(name, "")):
        raise ValueError(
            f"alerts.webhook_variable = {name!r}, but the environment of this process has no value for it: export "
            f"{name}, or remove the key"
        )
    return Webhook(url=url, timeout_s=config.webhook_timeout_s, retries=config.webhook_retries)


def _print(console: Console, event: Event) -> None:
    if isinstance(console, JsonLines):
        console.write_line(json.dumps({"step": event.step, "alert": event.sentence, "action": event.action}))
        return
    console.print(f"{'':12}[yellow]alert:[/] ", end="", highlight=False)
    console.print(event.sentence.removeprefix("alert "), markup=False, highlight=False, soft_wrap=True)
