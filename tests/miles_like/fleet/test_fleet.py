"""Servers that die, hang, come back wrong, are added and removed, beside a loop that goes on.

Processes and weights are made up; /health is answered over sockets. Not covered: whole runs
(tests/laws/test_replaced_servers.py) and Ray's actors (tests/miles_like/cluster/test_rollout_servers.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miles_like.fleet import fleet as fleet_module
from miles_like.fleet import health
from miles_like.fleet.control import ControlFiles, Request, ask, status
from miles_like.fleet.fleet import Fleet
from miles_like.fleet.roster import Roster
from miles_like.fleet.states import Event, State
from miles_like.types import NodeLostError, PublishReport, RanksLostError, ServerFault, ServerLost
from rollout.episodes.serving import Serving
from rollout.sglang.startup import Progress
from tests.support.refusals import refuses

TICK_S = 0.01
A, B = "http://a", "http://b"
Check = Callable[["World"], Awaitable[None]]


@dataclass
class World:
    """Servers 0 and 1 at A and B, and what is done with them. dead: their numbers; cannot: those that do not start;
    homeless: those whose node is lost; wrong: those that join with other weights; looks: statuses of their /health, in
    place of 200."""

    where: Path
    limit: int = 2
    least: int = 1
    dead: set[int] = field(default_factory=set)
    cannot: set[int] = field(default_factory=set)
    homeless: set[int] = field(default_factory=set)
    wrong: set[str] = field(default_factory=set)
    ranks_lost: bool = False
    looks: dict[str, Callable[[], Awaitable[int]]] = field(default_factory=dict)
    log: list[Any] = field(default_factory=list)
    reported: list[str] = field(default_factory=list)
    served: list[set[str]] = field(default_factory=list)
    _wanted: Callable[[], bool] | None = None
    _met: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.serving = Serving([A, B], lambda url, error: self.fleet.lost(url, error), limit_s=20.0)
        self.roster = Roster(limit=self.limit, window_s=60.0, least=self.least, say=self.say)
        self.fleet = Fleet(
            roster=self.roster,
            processes=self,
            serving=self.serving,
            files=ControlFiles(self.where),
            needs_trainer=True,
            health_every_s=TICK_S,
            health_timeout_s=2.0,
            tick_s=TICK_S,
        )

    # ---- as fleet.Processes

    def deaths(self) -> Mapping[int, str]:
        return dict.fromkeys(self.dead, "ended with signal SIGKILL")

    def halt(self, number: int) -> None:
        self.log.append(("halt", number))
        self.dead.discard(number)

    def restart(self, number: int) -> None:
        self.log.append(("restart", number))
        self.dead.discard(number)
        if number in self.homeless:
            raise NodeLostError("its node 10.0.0.2 is lost")

    def look(self, number: int) -> Progress:
        if number in self.cannot:
            return Progress("", "starting", failure="exit code 1")
        return Progress((A, B, "http://c")[number], "ready", ready=True)

    def add(self, number: int) -> None:
        self.log.append(("add", number))

    # ---- as fleet.Users

    def connect(self, urls: Sequence[str], joins: bool) -> None:
        self.log.append(("connect", list(urls), joins))

    def admit(self, url: str) -> None:
        self.log.append(("admit", url))

    def tell(self, urls: Collection[str]) -> None:
        self.served.append(set(urls))
        self.look_whether_met()

    async def abort(self, url: str) -> None: ...

    async def publish_version(self, version: int) -> PublishReport:
        return PublishReport(version=version, bytes=1, seconds=0.0, pause_seconds=0.0)

    async def join_version(self, urls: Collection[str]) -> Sequence[ServerFault]:
        self.log.append(("join", sorted(urls)))
        if self.ranks_lost:
            raise RanksLostError("publish: trainer rank 0", "see logs/", ())
        wrong = [url for url in urls if url in self.wrong]
        self.fleet.verified(set(urls) - set(wrong), 4)
        return [ServerFault(url, f"server {url} differs by 0.1 nats", answers=True) for url in wrong]

    # ---- the run

    async def status(self, url: str, path: str) -> int:
        return await self.looks[url]() if url in self.looks else 200

    def say(self, text: str) -> None:
        self.reported.append(text)
        self.look_whether_met()

    def look_whether_met(self) -> None:
        if self._wanted is not None and self._wanted():
            self._met.set()

    async def until(self, wanted: Callable[[], bool]) -> None:
        """It is looked at also within each change, because a state may be gone before this task goes on."""
        self._wanted, self._met = wanted, asyncio.Event()
        async with asyncio.timeout(60):
            while not (self._met.is_set() or wanted()):
                await asyncio.sleep(TICK_S / 2)
        self._wanted = None

    def state(self, number: int) -> State:
        return self.roster.servers[number].state

    def run(self, check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
        async def main() -> None:
            self.fleet.begin([A, B], 3)
            self.fleet.attach(self, [A, B])
            await self.fleet.settled()
            await self.fleet.beside(check(self))

        async def look_at(*arguments: Any) -> bool:
            return await health.look_at(*arguments, status=self.status)

        monkeypatch.setattr(fleet_module, "look_at", look_at)
        monkeypatch.setattr(fleet_module, "_STARTING_S", TICK_S)
        monkeypatch.setattr(health, "_SLICE_S", 0.05)
        monkeypatch.setattr(health, "SUSPECT_S", 0.1)
        asyncio.run(main())


Worlds = Callable[..., World]


@pytest.fixture
def world(tmp_path: Path) -> Worlds:
    return lambda **how: World(tmp_path, **how)


def test_a_dead_server_serves_again_once_it_is_verified(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(w: World) -> None:
        w.dead.add(1)
        await w.until(lambda: w.served[-1] == {A})  # the other one goes on
        await w.until(lambda: w.state(1) is State.HEALTHY)
        assert [x for x in w.log if x[0] != "connect"][-2:] == [("restart", 1), ("join", [B])]
        between = w.served[w.served.index({A}) : -1]
        assert all(B not in urls for urls in between) and B in w.served[-1]
        assert w.roster.servers[1].version == 4

    made = world()
    made.run(check, monkeypatch)
    states = [text.split(" is ")[1].partition(":")[0] for text in made.reported]
    assert states == ["dead", "restarting", "stale", "healthy"] and status(made.where)["ended"]


def test_a_server_with_wrong_weights_never_serves_and_the_run_goes_on_without_it(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(w: World) -> None:
        w.wrong.add(B)
        w.dead.add(1)
        await w.until(lambda: w.state(1) is State.RETIRED)
        assert not any(B in urls for urls in w.served[w.served.index({A}) :])
        assert w.log.count(("restart", 1)) == 2 and "differs by 0.1 nats" in w.roster.servers[1].why
        assert w.fleet.metrics()["rollout/servers_healthy"] == 1.0
        await w.until(lambda: ("halt", 1) in w.log)

    world().run(check, monkeypatch)


def test_between_two_lives_of_the_ranks_servers_are_restarted_and_none_joins(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next life publishes to those that are healthy; the others join it."""

    async def check(w: World) -> None:
        await w.fleet.prepare()  # a publication in which the ranks are lost
        await w.fleet.detach()
        w.dead.add(1)
        await w.until(lambda: w.state(1) is State.STALE)
        await asyncio.sleep(10 * TICK_S)
        assert w.log == [("halt", 1), ("restart", 1)], "it stays as it is, without a join"
        w.fleet.attach(w, [A])  # made before the other one had answered
        await w.fleet.prepare()
        assert w.fleet.targets == {A} and w.log[2:] == [("admit", B)]
        w.fleet.verified([A], 4)
        await w.fleet.settled()
        assert w.log[3:] == [("join", [B])] and w.served[-1] == {A, B}

    world().run(check, monkeypatch)


def test_a_server_whose_join_loses_the_ranks_is_not_at_fault(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(w: World) -> None:
        w.ranks_lost = True
        w.dead.add(1)
        await w.until(lambda: ("join", [B]) in w.log)
        await asyncio.sleep(10 * TICK_S)
        assert w.state(1) is State.STALE and w.log.count(("restart", 1)) == 1
        with pytest.raises(RanksLostError):
            await w.fleet.settled()

    world().run(check, monkeypatch)


def test_a_server_of_a_lost_node_is_retired_at_once(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other takes its place; one that is added has a further place."""

    async def check(w: World) -> None:
        w.fleet.lose({1}, "its node is lost")
        assert w.state(1) is State.RETIRED and w.served[-1] == {A}
        await w.until(lambda: ("halt", 1) in w.log)
        await asyncio.sleep(10 * TICK_S)
        assert ("restart", 1) not in w.log and w.roster.servers[1].why == "its node is lost"
        ask(w.where, Request("add"))
        await w.until(lambda: 2 in w.roster.servers and w.state(2) is State.HEALTHY)
        assert ("restart", 1) not in w.log and w.state(1) is State.RETIRED

    world().run(check, monkeypatch)


def test_a_server_whose_node_does_not_come_back_is_retired_by_the_first_try(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no rank was on the node, the run has not learnt of it otherwise."""

    async def check(w: World) -> None:
        w.homeless.add(1)
        w.dead.add(1)
        await w.until(lambda: w.state(1) is State.RETIRED)
        await asyncio.sleep(10 * TICK_S)
        assert w.log.count(("restart", 1)) == 1 and w.roster.servers[1].why == "its node 10.0.0.2 is lost"

    world(limit=9).run(check, monkeypatch)


def test_a_run_whose_servers_are_all_lost_ends_with_the_reason_of_each(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what waits for a server ends."""
    ends: list[str] = []

    async def check(w: World) -> None:
        w.cannot |= {0, 1}
        w.dead |= {0, 1}
        try:
            await w.serving.some([])
        except ServerLost as e:
            ends.append(str(e))
        await asyncio.sleep(60)

    made = world(limit=1)
    with refuses(RuntimeError, A, B, "rollout.min_servers", "rollout.restarts", "--resume") as caught:
        made.run(check, monkeypatch)
    assert not ends or ends == [str(caught.value)]
    assert status(made.where)["ended"]


def test_a_server_that_hangs_is_suspected_then_ended(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections are closed at once, so that what was in flight goes to others."""

    async def never() -> int:
        await asyncio.sleep(60)
        return 200

    async def check(w: World) -> None:
        w.looks[B] = never
        await w.until(lambda: w.state(1) is State.SUSPECT and w.served[-1] == {A})
        await w.until(lambda: w.state(1) is State.DEAD)
        del w.looks[B]
        await w.until(lambda: w.state(1) is State.HEALTHY)
        assert ("halt", 1) in w.log

    made = world()
    made.run(check, monkeypatch)
    assert any("rollout.health_timeout_s" in text for text in made.reported)


def test_a_server_that_answers_again_or_whose_engine_has_ended(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended() -> int:
        return 503

    async def refused() -> int:
        raise ConnectionRefusedError

    async def check(w: World) -> None:
        w.looks[B] = refused
        w.serving.lose(type("Engine", (), {"url": B})(), ServerLost("closed the connection"))
        assert w.state(1) is State.SUSPECT
        await asyncio.sleep(3 * TICK_S)
        assert w.state(1) is State.SUSPECT, "its process lives"
        del w.looks[B]
        await w.until(lambda: w.state(1) is State.HEALTHY)
        assert not w.roster.servers[1].restarts
        w.looks[B] = ended
        await w.until(lambda: w.state(1) in (State.DEAD, State.RESTARTING))

    world().run(check, monkeypatch)


def test_while_a_publication_goes_on_no_server_is_started(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would answer to requests that were meant for the one before it. Afterwards it joins alone."""

    async def check(w: World) -> None:
        await w.fleet.prepare()
        w.dead.add(1)
        await w.until(lambda: ("halt", 1) in w.log)
        await asyncio.sleep(5 * TICK_S)
        assert w.state(1) is State.DEAD
        w.fleet.fail([ServerFault(B, "closed the connection", answers=False)])
        w.fleet.verified({A}, 4)
        await w.fleet.settled()
        await w.until(lambda: w.state(1) is State.HEALTHY)
        await w.fleet.join(4, [B])
        await w.fleet.prepare()
        assert w.log[-2:] == [("connect", [B], True), ("connect", [A, B], False)]

    world().run(check, monkeypatch)


def test_no_server_joins_while_the_weights_change(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    """With none left, the next publication goes to the first that answers."""

    async def check(w: World) -> None:
        await w.fleet.close()
        w.dead |= {0, 1}
        await w.until(lambda: w.roster.urls(State.STALE) == [A, B])
        await asyncio.sleep(5 * TICK_S)
        assert not [x for x in w.log if x[0] == "join"]
        await w.fleet.prepare()
        assert w.fleet.targets == {A, B}

    world().run(check, monkeypatch)


def test_servers_are_added_and_removed(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(w: World) -> None:
        ask(w.where, Request("add"))
        await w.until(lambda: 2 in w.roster.servers and w.state(2) is State.HEALTHY)
        assert ("add", 2) in w.log and ("admit", "http://c") in w.log and w.served[-1] == {A, B, "http://c"}
        for number in (0, 1):
            ask(w.where, Request("remove", number))
        await w.until(lambda: ("halt", 0) in w.log and ("halt", 1) in w.log)
        assert w.served[-1] == {"http://c"} and [w.state(n) for n in (0, 1)] == [State.RETIRED] * 2
        ask(w.where, Request("remove", 2))
        await w.until(lambda: any("2 is not removed" in text for text in w.reported))
        assert w.state(2) is State.HEALTHY and "rollout.min_servers = 1" in w.reported[-1]
        ask(w.where, Request("add"))  # in the place of one that was removed
        await w.until(lambda: w.state(0) is State.HEALTHY)
        assert ("restart", 0) in w.log
        shown = {row["server"]: row["state"] for row in status(w.where)["servers"]}
        assert shown == {0: "healthy", 1: "retired", 2: "healthy"}
        with (w.where / "servers" / "requests.jsonl").open("a") as f:
            f.write('{"verb": "halve"}\n')
        await w.until(lambda: "halve" in w.reported[-1])

    made = world()
    made.run(check, monkeypatch)
    with refuses(ValueError, made.where, "--resume"):
        ask(made.where, Request("add"))
    with refuses(ValueError, made.where / "other" / "servers" / "status.json"):
        status(made.where / "other")


def test_what_goes_wrong_in_the_loop_ends_the_watch(world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(w: World) -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        world().run(check, monkeypatch)


def test_a_look_counts_slices_and_not_the_time_in_which_this_process_stood_still() -> None:
    """A driver that is suspended for an hour ends no server."""

    async def slow(url: str, path: str) -> int:
        await asyncio.sleep(0.3)
        return 200

    async def run() -> bool:
        loop = asyncio.get_running_loop()
        clock, ahead = loop.time, [0.0]
        loop.time = lambda: clock() + ahead[0]  # type: ignore[method-assign]
        loop.call_later(0.1, lambda: ahead.__setitem__(0, 3600.0))
        return await health.look_at(A, "/health", 30.0, pytest.fail, status=slow)

    assert asyncio.run(run())


def test_the_status_of_an_answer_over_a_socket() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\n\r\n" if b"/health" in head else b"garbage\r\n")
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await health.status_of(url, "/health") == 503
        with pytest.raises(ValueError):
            await health.status_of(url, "/other")
        server.close()
        await server.wait_closed()
        with pytest.raises(OSError):
            await health.status_of(url, "/health")

    asyncio.run(run())


def test_events_of_a_server_that_is_being_replaced_are_no_errors(world: Worlds, monkeypatch: Any) -> None:
    async def check(w: World) -> None:
        one = w.roster.servers[1]
        for event in (Event.FAILED, Event.RESTARTED):
            w.roster.move(one, event, "died")
        fault = ServerFault(B, "closed the connection", answers=False)
        w.fleet.fail([fault])
        w.fleet.leave_out([fault])
        w.fleet.lost(B, ServerLost("late"))
        w.fleet.verified([B], 4)
        assert one.state is State.RESTARTING

    world().run(check, monkeypatch)
