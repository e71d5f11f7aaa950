"""States of a rollout server, and what changes them. No I/O.

| | silent | answered | failed | restarted | up | outdated | verified | given up | removed | added |
|---|---|---|---|---|---|---|---|---|---|---|
| healthy    | suspect | healthy | dead    |            |       | stale   | healthy |         | retired |            |
| suspect    | suspect | healthy | dead    |            |       | stale   | healthy |         | retired |            |
| stale      | stale   | stale   | dead    |            |       | stale   | healthy |         | retired |            |
| dead       | dead    | dead    | dead    | restarting |       | dead    |         | retired | retired |            |
| restarting |         |         | dead    |            | stale |         |         |         | retired |            |
| retired    | retired | retired | retired |            |       | retired |         |         | retired | restarting |

A pair without an entry is an error of the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class State(Enum):
    HEALTHY = "healthy"  # serves the current version: the only state in which it gets requests
    SUSPECT = "suspect"  # a request or a look at its health was not answered
    STALE = "stale"  # answers, but was not shown to compute with the current version
    DEAD = "dead"  # its process has ended, it hangs, or it computes with other weights than it was sent
    RESTARTING = "restarting"  # its process starts and loads the model
    RETIRED = "retired"  # its restarts are used up, or it was removed


class Event(Enum):
    SILENT = "silent"  # did not answer a request, or a look at its health for some seconds
    ANSWERED = "answered"  # its health is good
    FAILED = "failed"  # has ended, has not answered for `rollout.health_timeout_s`, or has wrong weights
    RESTARTED = "restarted"  # another process was begun in its place
    UP = "up"  # that process answers
    OUTDATED = "outdated"  # a publication passes it over, or did not reach it
    VERIFIED = "verified"  # has the hashes of the current version, and scores the known text as the trainer does
    GIVEN_UP = "given up"  # no restart is left
    REMOVED = "removed"  # a user asked for it
    ADDED = "added"  # a user asked for it


_H, _S, _D, _B, _O, _R = State.HEALTHY, State.SUSPECT, State.DEAD, State.RESTARTING, State.STALE, State.RETIRED
TABLE: Mapping[State, Mapping[Event, State]] = {
    _H: {
        Event.SILENT: _S,
        Event.ANSWERED: _H,
        Event.FAILED: _D,
        Event.OUTDATED: _O,
        Event.VERIFIED: _H,
        Event.REMOVED: _R,
    },
    _S: {
        Event.SILENT: _S,
        Event.ANSWERED: _H,
        Event.FAILED: _D,
        Event.OUTDATED: _O,
        Event.VERIFIED: _H,
        Event.REMOVED: _R,
    },
    _O: {
        Event.SILENT: _O,
        Event.ANSWERED: _O,
        Event.FAILED: _D,
        Event.OUTDATED: _O,
        Event.VERIFIED: _H,
        Event.REMOVED: _R,
    },
    _D: {
        Event.SILENT: _D,
        Event.ANSWERED: _D,
        Event.FAILED: _D,
        Event.RESTARTED: _B,
        Event.OUTDATED: _D,
        Event.GIVEN_UP: _R,
        Event.REMOVED: _R,
    },
    _B: {Event.FAILED: _D, Event.UP: _O, Event.REMOVED: _R},
    _R: {
        Event.SILENT: _R,
        Event.ANSWERED: _R,
        Event.FAILED: _R,
        Event.OUTDATED: _R,
        Event.REMOVED: _R,
        Event.ADDED: _B,
    },
}


def transition(state: State, event: Event) -> State:
    """The state of a server in `state` after `event`. Raises ValueError for a pair that the table has not."""
    try:
        return TABLE[state][event]
    except KeyError:
        raise ValueError(f"a server that is {state.value} cannot be {event.value}") from None
