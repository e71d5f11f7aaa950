"""The rollout servers of a run and the state of each. No I/O, and no time but the clock that is given."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from miles_like.fleet.states import Event, State, transition
from miles_like.types import Json

_UNANSWERED = 3  # requests of a server whose health is good, within the window of restarts: its engine hangs


@dataclass(slots=True, kw_only=True)
class Server:
    """One server; it keeps its number and its URL when it is restarted."""

    number: int
    url: str  # "" before it has answered for the first time
    state: State
    version: int | None  # of the weights that it was shown to compute with; None: of none
    since: float  # seconds since the epoch
    why: str = ""
    placeless: bool = False  # its node is lost
    restarts: deque[float] = field(default_factory=deque)  # when, in seconds by the roster's clock
    unanswered: deque[float] = field(default_factory=deque)  # the same, of requests


@dataclass(slots=True, kw_only=True)
class Roster:
    """Owns the servers: all changes of their states are made here, and each is reported.

    limit: restarts of a server within `window_s` seconds. least: servers without which the run ends. say: gets a
    sentence for each change; changed: called after it.
    """

    limit: int
    window_s: float
    least: int
    say: Callable[[str], None]
    changed: Callable[[], None] = lambda: None
    clock: Callable[[], float] = time.monotonic
    servers: dict[int, Server] = field(default_factory=dict)
    _restarted: int = field(default=0, init=False)  # since the last metrics

    def start(self, urls: Sequence[str], version: int) -> None:
        """The servers of a run that begins, which have just loaded the weights `version`."""
        for number, url in enumerate(urls):
            self.servers[number] = Server(
                number=number, url=url, state=State.HEALTHY, version=version, since=time.time()
            )
        self.changed()

    def add(self, number: int) -> Server:
        """A further server, whose process starts; it has no URL yet."""
        made = self.servers[number] = Server(
            number=number, url="", state=State.RESTARTING, version=None, since=time.time(), why="added"
        )
        self.say(f"Rollout server {number} is added: it starts")
        self.changed()
        return made

    def move(self, server: Server, event: Event, why: str = "", version: int | None = None) -> None:
        """Raises ValueError as `transition`. why: names no server; version: of a server that is verified."""
        before, server.state = server.state, transition(server.state, event)
        match event:
            case Event.RESTARTED | Event.ADDED:
                server.restarts.append(self.clock())
                self._restarted += 1
            case Event.VERIFIED:
                server.version = version
                server.unanswered.clear()  # its engine has scored a text
        if event is Event.RESTARTED or server.state in (State.DEAD, State.RETIRED):
            server.version = None
        if server.state is before:
            return
        server.why, server.since = why or event.value, time.time()
        self.say(
            f"Rollout server {server.number} ({server.url}) is {server.state.value}: {self._reason(server, event)}"
        )
        self.changed()

    def _reason(self, server: Server, event: Event) -> str:
        if event is Event.RESTARTED:
            used = self.limit - self.left(server)
            return f"restart {used} of at most {self.limit} in {self.window_s:g} s"
        return server.why

    def unanswered(self, server: Server) -> bool:
        """Note a request that it did not answer: whether these are too many for a server whose health is good."""
        server.unanswered.append(self.clock())
        return len(self._recent(server.unanswered)) >= _UNANSWERED

    def left(self, server: Server) -> int:
        """Restarts."""
        return max(0, self.limit - len(self._recent(server.restarts)))

    def _recent(self, times: deque[float]) -> deque[float]:
        while times and times[0] < self.clock() - self.window_s:
            times.popleft()
        return times

    def at(self, url: str) -> Server | None:
        return next((s for s in self.servers.values() if s.url == url), None)

    def urls(self, *states: State) -> list[str]:
        """Of the servers in one of `states`, by their numbers."""
        return [s.url for s in self if s.state in states]

    def __iter__(self) -> Iterator[Server]:
        return iter(self.servers.values())

    @property
    def staying(self) -> int:
        """Servers that serve, or may again."""
        return sum(s.state is not State.RETIRED for s in self)

    def shortage(self) -> str | None:
        """Why the run cannot go on; None: it can."""
        if self.staying >= self.least:
            return None
        each = "; ".join(f"server {s.number} ({s.url}) is {s.state.value}: {s.why}" for s in self)
        return (
            f"{self.staying} rollout servers are left, but rollout.min_servers = {self.least}: {each}. A server is "
            f"restarted rollout.restarts = {self.limit} times in {self.window_s:g} s at most; --resume continues "
            "from the latest checkpoint"
        )

    def metrics(self) -> Mapping[str, float]:
        """Restarts are counted since the last call."""
        restarts, self._restarted = self._restarted, 0
        healthy = len(self.urls(State.HEALTHY))
        return {"rollout/servers_healthy": float(healthy), "rollout/restarts": float(restarts)}

    def rows(self) -> list[Json]:
        """Of each server, for `miles-like servers`."""
        return [
            {
                "server": s.number,
                "url": s.url,
                "state": s.state.value,
                "version": s.version,
                "restarts_left": self.left(s),
                "since": s.since,
                "why": s.why,
            }
            for s in self
        ]


def of_urls(roster: Roster, urls: Collection[str]) -> list[Server]:
    return [s for s in roster if s.url in urls]
