"""Each pair of a state and an event, as the table of the module has it, which is read from its docstring."""

from __future__ import annotations

import pytest

from miles_like.fleet import states
from miles_like.fleet.states import Event, State, transition
from tests.support.refusals import refuses


def _documented() -> dict[tuple[State, Event], State | None]:
    lines = [line for line in (states.__doc__ or "").splitlines() if line.startswith("|") and "---" not in line]
    head, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    events = [Event(name) for name in head[1:]]
    return {
        (State(row[0]), event): State(cell) if cell else None
        for row in rows
        for event, cell in zip(events, row[1:], strict=True)
    }


DOCUMENTED = _documented()


def test_the_table_is_whole() -> None:
    assert DOCUMENTED.keys() == {(state, event) for state in State for event in Event}


@pytest.mark.parametrize("state", State)
def test_each_event_leads_where_the_table_has_it(state: State) -> None:
    for event in Event:
        to = DOCUMENTED[state, event]
        if to is not None:
            assert transition(state, event) is to, (state, event)
            continue
        with refuses(ValueError, state.value, event.value, unrecorded="one of many pairs"):
            transition(state, event)


def test_only_a_verified_server_becomes_healthy_again() -> None:
    """Except one that was suspected and has its process and its weights still."""
    for (state, event), to in DOCUMENTED.items():
        if to is State.HEALTHY and state is not State.HEALTHY:
            assert event is Event.VERIFIED or (state, event) == (State.SUSPECT, Event.ANSWERED)
