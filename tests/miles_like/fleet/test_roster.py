"""Restarts are counted within a window, each change is reported, and what ends a run names each server."""

from __future__ import annotations

from miles_like.fleet.roster import Roster, Server
from miles_like.fleet.states import Event, State
from tests.support.refusals import check_refusal


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def rosters(n: int = 2) -> tuple[Roster, list[str], Clock]:
    reported, clock = list[str](), Clock()
    roster = Roster(limit=2, window_s=100.0, least=1, say=reported.append, clock=clock)
    roster.start([f"http://{i}" for i in range(n)], 0)
    return roster, reported, clock


def restarted(roster: Roster, server: Server) -> None:
    for event in (Event.FAILED, Event.RESTARTED, Event.UP):
        roster.move(server, event, "died")
    roster.move(server, Event.VERIFIED, version=3)


def test_restarts_are_counted_within_the_window() -> None:
    roster, _, clock = rosters()
    one = roster.servers[1]
    restarted(roster, one)
    clock.now = 60.0
    restarted(roster, one)
    assert roster.left(one) == 0 and roster.left(roster.servers[0]) == 2
    clock.now = 101.0
    assert roster.left(one) == 1
    assert roster.metrics() == {"rollout/servers_healthy": 2.0, "rollout/restarts": 2.0}
    assert roster.metrics()["rollout/restarts"] == 0.0


def test_a_server_that_is_not_healthy_has_no_url_among_those_that_serve() -> None:
    changes: list[list[str]] = []
    roster, reported, _ = rosters()
    roster.changed = lambda: changes.append(roster.urls(State.HEALTHY))
    restarted(roster, roster.servers[1])
    assert changes == [["http://0"]] * 3 + [["http://0", "http://1"]]
    assert reported[0] == "Rollout server 1 (http://1) is dead: died" and "restart 1 of at most 2" in reported[1]
    assert roster.rows()[1]["version"] == 3 and roster.rows()[1]["restarts_left"] == 1  # type: ignore[index, call-overload]


def test_a_run_without_enough_servers_ends_with_the_reason_of_each() -> None:
    roster, _, _ = rosters()
    for number, why in ((0, "ended with signal SIGKILL"), (1, "it hangs")):
        assert roster.shortage() is None
        roster.move(roster.servers[number], Event.FAILED, why)
        roster.move(roster.servers[number], Event.GIVEN_UP, why)
    facts = ("http://0", "http://1", "ended with signal SIGKILL", "it hangs", "rollout.min_servers", "--resume")
    check_refusal(roster.shortage() or "", *facts)


def test_requests_that_are_not_answered_are_counted_too() -> None:
    """An engine that hangs behind a health that is good."""
    roster, _, clock = rosters()
    one = roster.servers[1]
    assert [roster.unanswered(one) for _ in range(2)] == [False, False]
    clock.now = 101.0
    assert [roster.unanswered(one) for _ in range(3)] == [False, False, True]
