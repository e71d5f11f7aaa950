"""When an alert fires and when it is over: a pure function of the rows of metrics.jsonl.

A run that resumes reads the rows before its checkpoint again, so its alerts are in the state that they had there; a
report computes what fired from the file alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from miles_like.alerts.rows import ROLLBACK, Row
from miles_like.alerts.signals import SIGNALS
from miles_like.config.sections.watched.alerts import Action, AlertRule, AlertsConfig

PAGE = "docs/alerts.md"
_WHAT: Mapping[str, str] = {  # alert -> what its reading is, with {reading} and {threshold}
    "kl_spike": "a KL divergence is {reading} times the largest of the steps before",
    "entropy_collapse": "entropy has lost {reading} of what it had in the first steps, as a share",
    "reward_hacking": "the reward has risen while an evaluation is {reading} standard errors below the best one",
    "reward_latency": "99 % of the rewards take up to {reading} s",
    "policy_lag": "samples are {reading} weight versions old on average",
    "dead_groups": "a share of {reading} of the groups gives no gradient",
    "length_drift": "the mean length of answers has changed by a factor of {reading}",
    "stall": "a phase takes {reading} times its median",
    "eval_regression": "an evaluation is {reading} standard errors below the best one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An alert has fired, or is over."""

    kind: Literal["fired", "over"]
    alert: str
    step: int
    since: int  # the first step of those in a row whose reading would not have ended the alert
    reading: float
    threshold: float
    action: Action

    @property
    def sentence(self) -> str:
        what = _WHAT[self.alert].format(reading=f"{self.reading:.3g}")
        if self.kind == "over":
            return f"alert {self.alert} is over at step {self.step}: {what}"
        began = f" (since step {self.since})" if self.since < self.step else ""
        return (
            f"alert {self.alert} at step {self.step}{began}: {what}, threshold {self.threshold:g} "
            f"(see {PAGE}#{self.alert.replace('_', '-')})"
        )


@dataclass(frozen=True, slots=True)
class State:
    """Of one alert between two rows."""

    firing: bool = False
    since: int | None = None  # as of Event; None: the last reading was below what ends the alert


def advance(state: State, reading: float | None, step: int, name: str, rule: AlertRule) -> tuple[State, Event | None]:
    """The state after the reading of `step`, and what has happened. reading: None: the row has none."""
    if reading is None:
        return state, None
    since = (step if state.since is None else state.since) if reading >= rule.clear * rule.threshold else None
    firing = reading >= rule.threshold or (state.firing and since is not None)
    after = State(firing, since)
    if firing == state.firing:
        return after, None
    return after, Event(
        kind="fired" if firing else "over",
        alert=name,
        step=step,
        since=step if since is None else since,
        reading=reading,
        threshold=rule.threshold,
        action=rule.action,
    )


@dataclass(slots=True)
class Alerts:
    """All alerts of a run, in their state after the rows that were read."""

    config: AlertsConfig
    rows: list[Row] = field(default_factory=list)  # without those of steps that the run has given up
    states: dict[str, State] = field(default_factory=dict)  # by the alert's name; default: State()

    def read(self, row: Row) -> list[Event]:
        """What happens with the next row. A row of the same step as the last one adds to it."""
        step = int(row["step"])
        if ROLLBACK in row:
            self.rows = [one for one in self.rows if one["step"] <= row[ROLLBACK]]
            self.states.clear()
        if self.rows and self.rows[-1]["step"] == step:
            self.rows[-1] = {**self.rows[-1], **row}
        else:
            self.rows.append(dict(row))
        return [event for name, rule in self.config.rules() if (event := self._advance(name, rule, step)) is not None]

    def _advance(self, name: str, rule: AlertRule, step: int) -> Event | None:
        if rule.action == "off":
            return None
        return self.note(name, rule, SIGNALS[type(rule)](self.rows, rule), step)

    def note(self, name: str, rule: AlertRule, reading: float | None, step: int) -> Event | None:
        """What happens with a reading of an alert."""
        self.states[name], event = advance(self.states.get(name, State()), reading, step, name, rule)
        return event


def events(rows: Iterable[Row], config: AlertsConfig) -> list[Event]:
    """All that happens over the rows of a run."""
    alerts = Alerts(config)
    return [event for row in rows for event in alerts.read(row)]
