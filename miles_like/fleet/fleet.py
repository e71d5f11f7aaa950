"""The rollout servers of a run while it runs: watched, left out, restarted, brought up to the version, added, removed.

    driver                       watch (this module)                 processes (cluster.rollout_servers)
    -------------------------------------------------------------------------------------------------------------
    pools ----- does not answer --> suspect ---- hangs ----> dead ---- stop, start ---> restarting
    publication --- left out -----> dead, stale                                             | answers
    pools <---- healthy <------ joins: one full publication, hashes, known text <------ stale

A server joins while the weights of the trainer are those that the others serve: from the end of a publication until
the next training begins (`settled`, `close`), or at any time where publications do not need the trainer. While a
publication goes on no server is started, so that none answers to requests that were meant for the one before it.

The fleet outlives the trainer's ranks (miles_like.run.rebuild). What publishes to servers and sends them requests is
of one life of the ranks (`Users`); between two lives servers are watched and restarted, and none joins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from miles_like.fleet.control import ControlFiles, Request
from miles_like.fleet.health import HealthError, look_at
from miles_like.fleet.roster import Roster, Server, of_urls
from miles_like.fleet.states import Event, State
from miles_like.types import NodeLostError, PublishReport, RanksLostError, ServerFault, ServerLost
from rollout.episodes.serving import Serving
from rollout.wire import endpoints

_TICK_S = 1.0  # between two looks at processes
_STARTING_S = 0.2  # between two looks at one that starts
REMOVED = "a user has removed it"
_HEALTH, _JOIN = " health", "join"
_ABORT_S = 10.0  # for the samples of a server that is removed to come back unfinished
_UP = (State.HEALTHY, State.SUSPECT, State.STALE)  # states of a server with a process that has answered
T = TypeVar("T")


class Progress(Protocol):
    """Of a server that starts (rollout.sglang.startup)."""

    @property
    def url(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...


class Processes(Protocol):
    """The servers' processes (miles_like.cluster.rollout_servers). All of it blocks, and is called in threads."""

    def deaths(self) -> Mapping[int, str]:
        """Servers whose process, or a part of it, has ended, and why."""

    def halt(self, number: int) -> None:
        """Ends a server's processes at once."""

    def restart(self, number: int) -> None:
        """Ends a server's processes and begins others in their place, at the same URL. Raises NodeLostError, and other
        RuntimeErrors where a further try may help."""

    def look(self, number: int) -> Progress:
        """At one that starts. Raises RuntimeError where the process that owns it does not answer."""

    def add(self, number: int) -> None:
        """Begins another server. Raises ValueError where there is no place for it."""


class Users(Protocol):
    """What publishes to servers and sends them requests, during one life of the trainer's ranks."""

    def connect(self, urls: Sequence[str], joins: bool) -> None:
        """Creates every rank's publisher to some of the servers. joins: they join at a version that others serve."""

    async def publish_version(self, version: int) -> PublishReport:
        """Publishes to the servers that are connected."""

    async def join_version(self, urls: Collection[str]) -> Sequence[ServerFault]:
        """Brings servers up to the current version. Returns what is wrong with which. Raises RanksLostError, and
        RuntimeError or ValueError of the servers."""

    def admit(self, url: str) -> None:
        """Makes clients of a further server."""

    def tell(self, urls: Collection[str]) -> None:
        """Gets the servers that serve, for other processes that send them requests."""

    async def abort(self, url: str) -> None:
        """Ends all requests on a server that is removed."""


@dataclass(slots=True, kw_only=True)
class Fleet:
    """needs_trainer: publications send the trainer's weights as they are now, not files."""

    roster: Roster
    processes: Processes
    serving: Serving
    files: ControlFiles
    needs_trainer: bool
    health_every_s: float
    health_timeout_s: float
    paused_health: str = endpoints.MODEL_INFO  # asked of servers that are paused, where /health may generate a token
    tick_s: float = _TICK_S
    _users: Users | None = field(default=None, init=False)  # None: between two lives of the trainer's ranks
    _connected: frozenset[str] = field(default=frozenset(), init=False)
    targets: frozenset[str] = field(default=frozenset(), init=False)  # of the publication that goes on, or was last
    _publishing: bool = field(default=False, init=False)
    _paused: bool = field(default=False, init=False)  # by a publication that goes on, or that lost its ranks
    _open: bool = field(default=False, init=False)
    _joining: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)
    _looked: dict[int, float] = field(default_factory=dict, init=False)  # when at the health of a server
    _silent: dict[int, float] = field(default_factory=dict, init=False)  # seconds since its last answer
    _halted: set[int] = field(default_factory=set, init=False)  # servers whose processes were ended
    _begun: set[int] = field(default_factory=set, init=False)  # added ones, whose first process is there already
    _moved: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def begin(self, urls: Sequence[str], version: int) -> None:
        """Call once, with the servers of the run, which have just loaded the weights `version`."""
        self.roster.changed = self._changed
        self.roster.start(urls, version)

    # ---- lives of the trainer's ranks

    def attach(self, users: Users, urls: Collection[str]) -> None:
        """A life of the ranks begins, whose `users` are connected to the servers at `urls` and have clients of them."""
        self._users, self._connected, self.targets = users, frozenset(urls), frozenset(urls)
        for server in self.roster:
            if server.url and server.url not in urls:  # added since
                users.admit(server.url)
        self._serve()

    async def detach(self) -> None:
        """It ends: nothing is published to servers until the next one. Those that serve keep their state."""
        self._users, self._open, self._publishing = None, False, False
        if (join := self._tasks.pop(_JOIN, None)) is not None:
            join.cancel()
            await asyncio.wait({join})

    @property
    def _of_life(self) -> Users:
        if self._users is None:
            raise RuntimeError("publication before `attach`")
        return self._users

    def lose(self, numbers: Collection[int], why: str) -> None:
        """The nodes of these servers are lost: they are not started again."""
        for server in self.roster:
            if server.number in numbers:
                self._give_up(server, why)

    def _give_up(self, server: Server, why: str) -> None:
        """Its place is lost."""
        server.placeless = True
        if server.state is not State.RETIRED:
            if server.state is not State.DEAD:
                self.roster.move(server, Event.FAILED, why)
            self.roster.move(server, Event.GIVEN_UP, why)

    # ---- publications

    async def prepare(self) -> None:
        """Call before a publication. It goes to the servers that are healthy, or, where there is none, to the first
        that answers. Raises RuntimeError where no server is left."""
        await self.close()
        while not (urls := self.roster.urls(State.HEALTHY) or self.roster.urls(State.STALE)):
            await self._change()
        self._publishing = self._paused = True
        for server in self.roster:
            if server.state is State.SUSPECT and server.url not in urls:
                self.roster.move(server, Event.OUTDATED, "the publication does not wait for it")
        self.targets = frozenset(urls)
        if self.targets != self._connected:
            self._connect(urls, joins=False)

    def _connect(self, urls: Sequence[str], *, joins: bool) -> None:
        self._connected = frozenset() if joins else frozenset(urls)
        self._of_life.connect(urls, joins)

    async def publish(self, version: int, urls: Collection[str]) -> PublishReport:
        """Publishes to some of the targets."""
        if frozenset(urls) != self._connected:
            self._connect([url for url in self.roster.urls(*State) if url in urls], joins=False)
        return await self._of_life.publish_version(version)

    async def join(self, version: int, urls: Collection[str]) -> PublishReport:
        """Publishes to servers that were started since, by one full load."""
        self._connect([url for url in self.roster.urls(*State) if url in urls], joins=True)
        return await self._of_life.publish_version(version)

    def leave_out(self, faults: Sequence[ServerFault]) -> None:
        """Sends these servers no further request until they are verified."""
        for fault in faults:
            for server in of_urls(self.roster, [fault.url]):
                if server.state is not State.RESTARTING:
                    self.roster.move(server, Event.OUTDATED, fault.why)

    def fail(self, faults: Sequence[ServerFault]) -> None:
        """Gives these servers up as they are; others take their place."""
        for fault in faults:
            for server in of_urls(self.roster, [fault.url]):
                if server.state is not State.RESTARTING:  # it is replaced already
                    self.roster.move(server, Event.FAILED, fault.why)

    def verified(self, urls: Collection[str], version: int) -> None:
        """These servers compute with the weights of `version`, and get requests from now on."""
        for server in of_urls(self.roster, urls):
            if server.state in _UP:
                self.roster.move(server, Event.VERIFIED, f"has version {version}", version)

    async def settled(self) -> None:
        """Call when a publication is over and its servers are verified: waits until at least one is healthy. Raises
        RuntimeError where no server is left."""
        self._publishing, self._paused, self._open = False, False, True
        self._serve()  # also those that another process left out, and that answer
        await self._join_stale()
        while not self.roster.urls(State.HEALTHY):
            await self._change()
            await self._join_stale()

    async def close(self) -> None:
        """Call before the trainer's weights change: no server joins until `settled`."""
        self._open = False
        async with self._joining:
            pass

    async def _join_stale(self) -> None:
        async with self._joining:
            urls = self.roster.urls(State.STALE)
            if not urls or not self._open or self._users is None:
                return
            try:
                faults = await self._users.join_version(urls)
            except RanksLostError:  # with which this life ends
                raise
            except (RuntimeError, ValueError) as e:  # of these servers: no others were asked
                faults = [ServerFault(url, str(e), answers=True) for url in urls]
            self.fail(faults)

    async def _join_beside(self) -> None:
        """The ranks' next call raises what this one ignores, or their watch."""
        try:
            await self._join_stale()
        except RanksLostError:
            await asyncio.sleep(self.tick_s)

    def metrics(self) -> Mapping[str, float]:
        reissued, self.serving.reissued = self.serving.reissued, 0
        return {**self.roster.metrics(), "rollout/reissued": float(reissued)}

    # ---- the watch

    def lost(self, url: str, error: ServerLost) -> None:
        """A server did not answer a request, which goes to another."""
        if (server := self.roster.at(url)) is None or server.state is not State.HEALTHY:
            return
        if self.roster.unanswered(server):
            self.roster.move(server, Event.FAILED, f"its health is good, but requests are not answered: {error}")
        else:
            self.roster.move(server, Event.SILENT, str(error))
        self._looked.pop(server.number, None)

    async def beside(self, main: Coroutine[Any, Any, T]) -> T:
        """`main`, while the servers are watched. Raises RuntimeError, and cancels it, where too few are left."""
        work, watch = asyncio.ensure_future(main), asyncio.ensure_future(self._watch())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                watch.result()
            return await work
        finally:
            for task in (work, watch, *self._tasks.values()):
                task.cancel()
            await asyncio.wait({work, watch, *self._tasks.values()})
            self.files.write(self.roster.rows(), ended=True)

    async def _watch(self) -> None:
        while True:
            self._moved.clear()  # what changes from here on is acted on at once
            await self._look_at_processes()
            for request in self.files.asked():
                await self._answer(request)
            for server in list(self.roster):
                self._act(server)
            if (shortage := self.roster.shortage()) is not None:
                self.serving.end(shortage)
                raise RuntimeError(shortage)
            self._start(_JOIN, self._join_beside, wanted=self._open and bool(self.roster.urls(State.STALE)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.tick_s):
                    await self._moved.wait()

    async def _look_at_processes(self) -> None:
        there = {s.number: len(s.restarts) for s in self.roster if s.state in _UP}
        for number, why in (await asyncio.to_thread(self.processes.deaths)).items():
            server = self.roster.servers[number]
            if server.state in _UP and there.get(number) == len(server.restarts):  # the process that was looked at
                self.roster.move(server, Event.FAILED, why)

    def _act(self, server: Server) -> None:
        """What the state of a server asks for."""
        name = f"server {server.number}"
        match server.state:
            case State.HEALTHY | State.SUSPECT | State.STALE:
                self._start(name + _HEALTH, lambda: self._look_at_health(server), wanted=self._look_is_due(server))
            case State.DEAD if not self.roster.left(server):
                self.roster.move(server, Event.GIVEN_UP, server.why)
            case State.DEAD | State.RETIRED if server.number not in self._halted:
                self._start(name, lambda: self._halt(server))
            case State.DEAD if not (self._publishing or self._joining.locked()):
                self.roster.move(server, Event.RESTARTED)
            case State.RESTARTING if name in self._tasks or not self._publishing:
                self._start(name, lambda: self._restart(server))

    def _look_is_due(self, server: Server) -> bool:
        now = asyncio.get_running_loop().time()
        every = self.tick_s if server.state is State.SUSPECT else self.health_every_s
        if now - self._looked.get(server.number, -every) < every:
            return False
        self._looked[server.number] = now
        return True

    async def _look_at_health(self, server: Server) -> None:
        def silent(why: str) -> None:
            if server.state is State.HEALTHY:
                self.roster.move(server, Event.SILENT, why)

        path = self.paused_health if self._paused else endpoints.HEALTH
        try:
            answers = await look_at(server.url, path, self.health_timeout_s, silent)
        except HealthError as e:
            if server.state in _UP:
                self.roster.move(server, Event.FAILED, str(e))
            return
        if server.state not in _UP:
            return
        if answers:
            self._silent.pop(server.number, None)
            self.roster.move(server, Event.ANSWERED, "it answers again")
            return
        silent("it cannot be reached")
        late = self._silent[server.number] = self._silent.get(server.number, 0.0) + self.tick_s
        if late >= self.health_timeout_s:
            self.roster.move(server, Event.FAILED, f"it could not be reached for {late:g} s")

    async def _halt(self, server: Server) -> None:
        """What was in flight on a server that is dead goes to others as soon as its connections are closed."""
        if server.why == REMOVED and self._users is not None:
            with contextlib.suppress(TimeoutError, RuntimeError):
                async with asyncio.timeout(_ABORT_S):
                    await self._users.abort(server.url)
        await asyncio.to_thread(self.processes.halt, server.number)
        self._halted.add(server.number)

    async def _restart(self, server: Server) -> None:
        self._halted.discard(server.number)
        try:
            if server.number not in self._begun:
                await asyncio.to_thread(self.processes.restart, server.number)
            self._begun.discard(server.number)
            while not (found := await asyncio.to_thread(self.processes.look, server.number)).ready:
                if found.failure is not None:
                    raise RuntimeError(found.failure)
                await asyncio.sleep(_STARTING_S)
        except RuntimeError as e:
            if isinstance(e, NodeLostError):
                self._give_up(server, str(e))
            elif server.state is State.RESTARTING:
                self.roster.move(server, Event.FAILED, str(e))
            return
        if server.state is not State.RESTARTING:  # removed meanwhile
            return
        if not server.url:
            server.url = found.url
            if self._users is not None:
                self._users.admit(found.url)
        self._silent.pop(server.number, None)
        self.roster.move(server, Event.UP, "its process answers")

    def _start(self, name: str, make: Callable[[], Coroutine[Any, Any, None]], *, wanted: bool = True) -> None:
        """At most one task of a name, which wakes the watch when it ends; its errors are raised by the next call."""
        if (task := self._tasks.get(name)) is not None:
            if not task.done():
                return
            del self._tasks[name]
            task.result()
        if wanted:
            task = self._tasks[name] = asyncio.create_task(make())
            if not name.endswith(_HEALTH):  # of which there are many; it changes a state, or nothing is to be done
                task.add_done_callback(lambda _: self._moved.set())

    # ---- what users ask for

    async def _answer(self, request: Request | str) -> None:
        if isinstance(request, str):
            self.roster.say(f"Refused: {request}")
        elif request.verb == "add":
            await self._add()
        else:
            await self._remove(request.server)

    async def _add(self) -> None:
        retired = next((s for s in self.roster if s.state is State.RETIRED and not s.placeless), None)
        if retired is not None:  # its place and its devices are free
            retired.restarts.clear()
            self.roster.move(retired, Event.ADDED, "added")
            return
        try:
            number = 1 + max(self.roster.servers)
            await asyncio.to_thread(self.processes.add, number)
            self._begun.add(number)
            self.roster.add(number)
        except (ValueError, RuntimeError) as e:
            self.roster.say(f"No rollout server is added: {e}")

    async def _remove(self, number: int | None) -> None:
        server = None if number is None else self.roster.servers.get(number)
        if server is None or server.state is State.RETIRED:
            there = ", ".join(str(s.number) for s in self.roster if s.state is not State.RETIRED)
            self.roster.say(f"Rollout server {number} is not removed: the servers are {there}")
        elif self.roster.staying <= self.roster.least:
            self.roster.say(
                f"Rollout server {number} is not removed: {self.roster.staying} servers are there, and "
                f"rollout.min_servers = {self.roster.least}"
            )
        else:
            self.roster.move(server, Event.REMOVED, REMOVED)

    # ---- changes

    def _serve(self) -> None:
        urls = self.roster.urls(State.HEALTHY)
        self.serving.serve(urls)
        if self._users is not None:
            self._users.tell(urls)

    def _changed(self) -> None:
        self._serve()
        self.files.write(self.roster.rows())
        self._moved.set()

    async def _change(self) -> None:
        """Waits for a change of a state, or for a task of the watch to end. Raises RuntimeError where too few servers
        are left: the run ends."""
        self._moved.clear()
        await self._moved.wait()
        if (shortage := self.roster.shortage()) is not None:
            raise RuntimeError(shortage)
