"""Intervals of what each server and the trainer did, in seconds since the run began."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from miles_like.simulation.clock.virtual_time import now

ServerState = Literal["busy", "paused", "idle"]  # "paused": samples wait for a publication; "idle": there are none
TrainerState = Literal[
    "samples", "experience", "train", "settle", "publish", "checks", "evaluate", "save", "turn", "other", "restart"
]


class ServerInterval(NamedTuple):
    begin: float
    end: float
    state: ServerState
    running: int  # samples in the batch


class TrainerInterval(NamedTuple):
    begin: float
    end: float
    state: TrainerState


@dataclass(slots=True)
class ServerTimeline:
    intervals: list[ServerInterval] = field(default_factory=list)
    _since: float = 0.0
    _state: ServerState = "idle"
    _running: int = 0

    def note(self, time: float, state: ServerState, running: int) -> None:
        """Enter `state` at `time`, with `running` samples on the server."""
        if (state, running) != (self._state, self._running):
            if time > self._since:
                self.intervals.append(ServerInterval(self._since, time, self._state, self._running))
            self._since, self._state, self._running = time, state, running

    def close(self, time: float) -> None:
        """End the last interval at `time`, the end of the run or of this server."""
        if time > self._since:
            self.intervals.append(ServerInterval(self._since, time, self._state, self._running))
        self._since, self._state, self._running = time, "idle", 0


@dataclass(slots=True)
class TrainerTimeline:
    """The trainer's intervals, which cover the whole run; time outside of every `phase` has the state "other"."""

    intervals: list[TrainerInterval] = field(default_factory=list)
    _since: float = 0.0
    _state: TrainerState = "other"

    @contextmanager
    def phase(self, state: TrainerState) -> Iterator[None]:
        """Context in which the trainer is in `state`. In a nested context it is in the inner state."""
        outer = self._state
        self._enter(state)
        try:
            yield
        finally:
            self._enter(outer)

    def close(self) -> None:
        self._enter("other")

    def _enter(self, state: TrainerState) -> None:
        if now() > self._since:
            self.intervals.append(TrainerInterval(self._since, now(), self._state))
        self._since, self._state = now(), state


def shares(intervals: Sequence[ServerInterval | TrainerInterval], begin: float, end: float) -> dict[str, float]:
    """Seconds in each state between `begin` and `end`."""
    found = defaultdict[str, float](float)
    for interval in intervals:
        if (seconds := min(interval.end, end) - max(interval.begin, begin)) > 0:
            found[interval.state] += seconds
    return dict(found)


def running_mean(intervals: Sequence[ServerInterval], begin: float, end: float) -> float:
    """Mean number of running samples over the time in which the server is busy; 0 if it never is."""
    busy = total = 0.0
    for i in intervals:
        seconds = min(i.end, end) - max(i.begin, begin)
        if i.state == "busy" and seconds > 0:
            busy, total = busy + seconds, total + seconds * i.running
    return total / busy if busy else 0.0


def while_idle(
    server: Sequence[ServerInterval], trainer: Sequence[TrainerInterval], begin: float, end: float
) -> dict[str, float]:
    """Seconds in which the server is idle, by the state of the trainer at that time. Both lists are in order of
    time."""
    found, first = defaultdict[str, float](float), 0
    for s in server:
        if s.state != "idle" or s.end <= begin or s.begin >= end:
            continue
        while first < len(trainer) and trainer[first].end <= s.begin:
            first += 1
        for t in trainer[first:]:
            if t.begin >= s.end:
                break
            if (seconds := min(s.end, t.end, end) - max(s.begin, t.begin, begin)) > 0:
                found[t.state] += seconds
    return dict(found)
