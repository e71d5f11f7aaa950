"""Rollout servers, each owned by a Ray actor; a server that spans nodes by one for its part on each node."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray.exceptions import RayError

from miles_like.cluster.actors import ACTOR_S, Process
from miles_like.cluster.placement import PortShare, Slot
from miles_like.cluster.run_nodes import RunNodes
from miles_like.nodes.blocks import own_address
from miles_like.nodes.members import living_nodes
from miles_like.nodes.session import is_local
from miles_like.nodes.waits import get_result
from miles_like.types import NodeLostError
from rollout.sglang.ports import BLOCK, ephemeral_range, first_ports, free_blocks
from rollout.sglang.servers import ServerLaunch
from rollout.sglang.startup import POLL_S, Progress, Startup

_LOOK_S = 60.0  # time limit for an actor to look at its process
_FAILED_S = 10.0  # the same, where the run has failed already
_GRACE_S = 1.0  # for a server that hangs, or of which nothing is wanted any more
_PINGS = 5


class _Server(Process):
    """Owns one server process, which ends with this actor."""

    beside: ClassVar[Mapping[str, int]] = {"end": 1}
    startup: Startup | None = None

    def ephemeral_range(self) -> tuple[int, int]:
        return ephemeral_range()

    def begin(self, launch: ServerLaunch) -> None:
        self.startup = Startup(launch)

    def look(self, ready: bool) -> Progress:
        """ready: the server answers, so that only the process is looked at."""
        assert self.startup is not None, "look before begin"
        if ready:
            self.startup.mark_ready()
        return self.startup.poll()

    @ray.method(concurrency_group="end")
    def await_end(self) -> str | None:
        """Waits until the process of a server that answers has ended; returns why."""
        assert self.startup is not None, "await_end before begin"
        self.startup.handle.await_end()
        return self.startup.poll().failure

    def clock(self) -> float:
        """Of `Progress.failed_at`."""
        return time.monotonic()

    def stop(self, grace_s: float = 10.0) -> None:
        """grace_s: for the process to end by itself."""
        if self.startup is not None:  # None where the launch failed
            self.startup.handle.stop(grace_s)


class RayServers:
    """Rollout servers or those of teachers, each owned by an actor on its node."""

    def __init__(
        self,
        launches: Sequence[tuple[Slot, ServerLaunch]],
        nodes: RunNodes,
        log_dir: Path,
        share: PortShare | None = None,
    ) -> None:
        """Begins to start all servers; `wait` returns once they answer. share: as that of `with_ports`.

        Where the run uses another node than this process's, a server listens on its node's address; the parts of a
        server that spans nodes connect to a port of its first node.
        """
        self._slots = [slot for slot, _ in launches]
        self._title = launches[0][1].title if launches else "rollout server"
        self._names = [f"{self._title} {s.index}{f' part {s.node_rank}' if s.nnodes > 1 else ''}" for s in self._slots]
        self._nodes, self._log_dir = nodes, log_dir
        self._logs = [self._log_of(s) for s in self._slots]
        self._actors = [nodes.start(_Server, s, log) for s, log in zip(self._slots, self._logs, strict=True)]
        self._urls: dict[int, str] = {}  # of servers that have answered
        self._ready: set[int] = set()  # servers that answer
        self._halted = set[int]()  # servers that are not wanted, or not yet started again
        self._ends: dict[int, tuple[Any, Any]] = {}  # part -> its actor, and the call that ends with its process
        self._shown: dict[int, str] = {}  # server -> the phase that was reported last
        addresses = self._results([a.address.remote() for a in self._actors], ACTOR_S)
        # whether the clients of the servers are here too
        self._here = {own_address()} == {node.address for node in nodes.nodes}
        hosts = ["127.0.0.1" if self._here else ip for ip, _ in addresses]
        placed = [
            replace(launch, host=host, index=slot.index) for (slot, launch), host in zip(launches, hosts, strict=True)
        ]
        if any(launch.config.engine == "sglang" for launch in placed):
            ranges = self._results([a.ephemeral_range.remote() for a in self._actors], ACTOR_S)
            placed = with_ports(self._slots, placed, ranges, share)
        self._placed = placed
        self._begun = [a.begin.remote(launch) for a, launch in zip(self._actors, placed, strict=True)]

    def wait(self, say: Callable[[str], None] = lambda text: None) -> list[str]:
        """URL of every server. say: called with each new phase of a server.

        Raises RuntimeError, after stopping all servers, with the failure that happened first as soon as it is seen: of
        a server that ended or exceeded a limit, on whichever of its nodes.
        """
        try:
            self._results(self._begun, ACTOR_S)
            self._wait(say, range(len(self._slots)))
        except RuntimeError:
            self.stop()
            raise
        return list(self._urls.values())

    def replace(self, urls: Collection[str], say: Callable[[str], None] = lambda text: None) -> None:
        """Stop the servers at `urls`, with all their parts, and start others with the same weights in their slots, at
        the same URLs. Returns once they answer. say, RuntimeError: as of `wait`; the other servers run on."""
        servers = {server for server, url in self._urls.items() if url in urls}
        for server in servers:
            self.restart(server)
        self._wait(say, [i for i, s in enumerate(self._slots) if s.index in servers])

    # ---- a run that goes on without some of its servers (miles_like.fleet)

    def deaths(self) -> dict[int, str]:
        """Servers that were ready and whose process, or that of a part, or the actor that owns it, has ended, and why.
        Does not wait, and asks no actor again. Never raises."""
        parts = [i for i, s in enumerate(self._slots) if s.index in self._ready and s.index not in self._halted]
        self._ends = {i: self._end_of(i) for i in parts}
        refs = {ref: i for i, (_, ref) in self._ends.items()}
        done, _ = ray.wait([*refs], num_returns=len(refs), timeout=0) if refs else ([], [])
        found: dict[int, str] = {}
        for ref in done:
            i = refs[ref]
            try:
                failure = get_result(ref, self._names[i], _LOOK_S)
            except RuntimeError as e:
                failure = str(e)
            if failure is not None:
                found.setdefault(self._slots[i].index, failure)
        return found

    def _end_of(self, i: int) -> tuple[Any, Any]:
        actor = self._actors[i]
        held = self._ends.get(i)
        return held if held is not None and held[0] is actor else (actor, actor.await_end.remote())

    def halt(self, server: int) -> None:
        """End a server's processes, of all its parts, almost at once. Never raises."""
        self._halted.add(server)
        self._ready.discard(server)
        self._stop(self._parts(server), _GRACE_S)

    def restart(self, server: int) -> None:
        """End a server's processes and begin others in their slots, at the same URL. Raises NodeLostError, and
        RuntimeError where they cannot be begun; `look` says when they answer."""
        self.halt(server)
        living = self.living()
        for slot in (self._slots[i] for i in self._parts(server)):
            if slot.node not in living:
                raise NodeLostError(f"its node {self._nodes.of(slot).address} is lost")
        parts, url = self._parts(server), self._urls.get(server)
        for i in parts:
            slot = self._slots[i]
            if slot.node_rank == 0 and url is not None:
                self._placed[i] = replace(self._placed[i], port=int(url.rpartition(":")[2]))
            self._actors[i] = self._nodes.start(_Server, slot, self._logs[i])
        self._halted.discard(server)
        self._results([self._actors[i].begin.remote(self._placed[i]) for i in parts], ACTOR_S, parts)

    def living(self) -> Collection[int]:
        """The numbers of the run's nodes that are not lost."""
        alive = {node.id for node in living_nodes()}
        return [number for number, node in enumerate(self._nodes.nodes) if node.id in alive]

    def look(self, server: int) -> Progress:
        """At a server that starts: its head, or the failure of one of its parts. Raises RuntimeError where an actor
        does not answer."""
        parts = self._parts(server)
        looks = self._look(_LOOK_S, parts)
        head = next(looks[i] for i in parts if self._slots[i].node_rank == 0)
        if head.ready:
            self._urls[server] = head.url
            self._ready.add(server)
        return next((look for look in looks.values() if look.failure is not None), head)

    def add(self, slot: Slot, launch: ServerLaunch) -> None:
        """Begin to start another server of one part, on CPU. Raises RuntimeError where it cannot be begun."""
        log = self._log_of(slot)
        actor = self._nodes.start(_Server, slot, log)
        name = f"{self._title} {slot.index}"
        ip, _ = get_result(actor.address.remote(), name, ACTOR_S)
        placed = replace(launch, host="127.0.0.1" if self._here else ip, index=slot.index)
        get_result(actor.begin.remote(placed), name, ACTOR_S)
        self._placed.append(placed)
        self._names.append(name)
        self._logs.append(log)
        self._actors.append(actor)
        self._slots.append(slot)  # last: other threads find the rest by it

    def _parts(self, server: int) -> list[int]:
        return [i for i, slot in enumerate(self._slots) if slot.index == server]

    def _log_of(self, slot: Slot) -> Path:
        return self._log_dir / f"rollout_actor{slot.index}.{slot.node_rank}.log"

    # ---- starts and failures

    def _wait(self, say: Callable[[str], None], parts: Sequence[int]) -> None:
        """Until all servers with these parts answer."""
        heads = {self._slots[i].index: i for i in parts if self._slots[i].node_rank == 0}
        while True:
            looks = self._look(_LOOK_S, parts)
            ready = {server for server, i in heads.items() if looks[i].ready}
            if ready - self._ready:  # the parts of a server that answers are not late
                self._ready |= ready
                continue
            if (failure := self._first_failure(looks)) is not None:
                raise RuntimeError(failure)
            for server, i in heads.items():
                if looks[i].phase != self._shown.get(server):
                    self._shown[server] = looks[i].phase
                    say(f"{self._title} {server} of {1 + max(s.index for s in self._slots)}: {looks[i].phase}")
            if heads.keys() <= self._ready:
                self._urls |= {server: looks[i].url for server, i in heads.items()}
                return
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Add to a RuntimeError of the block what happened to the server, or to a part of it on another node: the error
        of a client says only that it does not answer."""
        try:
            yield
        except RuntimeError as e:
            if (failure := self.failure()) is None:
                raise
            raise RuntimeError(f"{e}; {failure}") from e

    def failure(self) -> str | None:
        """Which server or part has ended first, and why; None while all run. Never raises."""
        wanted = [i for i, slot in enumerate(self._slots) if slot.index not in self._halted]
        try:
            return self._first_failure(self._look(_FAILED_S, wanted))
        except RuntimeError as e:
            return str(e)

    def _first_failure(self, looks: Mapping[int, Progress]) -> str | None:
        """The earliest failure, because those of other parts and servers may follow from it. Raises as `_results`."""
        failed = [i for i, look in looks.items() if look.failure is not None]
        nodes = {self._slots[i].node: i for i in failed}
        ahead = {node: self._clock_offset(i) if len(nodes) > 1 else 0.0 for node, i in nodes.items()}
        order = sorted(failed, key=lambda i: looks[i].failed_at - ahead[self._slots[i].node])
        return looks[order[0]].failure if order else None

    def _clock_offset(self, i: int) -> float:
        """The clock of an actor's node minus this process's, by the fastest of some round trips: the clocks of two
        nodes have nothing in common. Of an actor that does not answer it is -inf, so that its failure is the last."""
        trips = []
        for _ in range(_PINGS):
            began = time.monotonic()
            try:
                there = get_result(self._actors[i].clock.remote(), self._names[i], _FAILED_S)
            except RuntimeError:
                return -math.inf
            ended = time.monotonic()
            trips.append((ended - began, there - (began + ended) / 2))
        return float(min(trips)[1])

    def _look(self, timeout_s: float, parts: Sequence[int]) -> dict[int, Progress]:
        refs = [self._actors[i].look.remote(self._slots[i].index in self._ready) for i in parts]
        return dict(zip(parts, self._results(refs, timeout_s, parts), strict=True))

    def _results(self, refs: Sequence[Any], timeout_s: float, parts: Sequence[int] | None = None) -> list[Any]:
        """The answers of the actors of `parts`, of all for None. Raises RuntimeError that names the first server
        without one."""
        deadline = time.monotonic() + timeout_s
        names = self._names if parts is None else [self._names[i] for i in parts]
        return [
            get_result(ref, name, max(0.0, deadline - time.monotonic())) for ref, name in zip(refs, names, strict=True)
        ]

    def ended(self, url: str) -> bool:
        """Whether the process of the server at `url`, or of a part of it, or the actor that owns it has ended. Never
        raises."""
        parts = [i for i, slot in enumerate(self._slots) if self._urls.get(slot.index) == url]
        try:
            return any(look.failure is not None for look in self._look(_FAILED_S, parts).values())
        except RuntimeError:
            return True

    def stop(self) -> None:
        """Stop all servers. Never raises, because it may run while another error propagates; the server of a dead actor
        has ended with it."""
        self._stop(range(len(self._slots)))

    def _stop(self, parts: Sequence[int], grace_s: float = 10.0) -> None:
        stopping = [self._actors[i].stop.remote(grace_s) for i in parts]
        for i, ref in zip(parts, stopping, strict=True):
            with contextlib.suppress(RayError):
                ray.get(ref, timeout=30)
            ray.kill(self._actors[i])


def with_ports(
    slots: Sequence[Slot],
    launches: Sequence[ServerLaunch],
    ranges: Sequence[tuple[int, int]],
    share: PortShare | None = None,
) -> list[ServerLaunch]:
    """`launches` of stock servers with fixed ports and rendezvous addresses: no two servers share a port, on any node.

    ranges: the ephemeral range of each launch's node. share: of these servers in the ports of the run's; None: they are
    all. On a local Ray a server without a configured port takes a free one, and the blocks of rendezvous ports are free
    ones, so that several runs fit on a machine. The parts of a server meet at its first node's address; the ranks of a
    server on a single node at the loopback address.
    """
    before, servers = share or PortShare(0, 1 + max(slot.index for slot in slots))
    config, http = launches[0].config, None
    dist_init = config.sglang.dist_init_port
    if not is_local():
        http, dist_init = first_ports(servers, http=config.port, dist_init=dist_init, ranges=ranges)
    elif dist_init is None:
        dist_init = free_blocks(servers)
    first = {slot.index: launch.host for slot, launch in zip(slots, launches, strict=True) if slot.node_rank == 0}
    return [
        replace(
            launch,
            port=http + before + slot.index if launch.port is None and http is not None else launch.port,
            dist_init_addr=f"{first[slot.index] if slot.nnodes > 1 else '127.0.0.1'}"
            f":{dist_init + BLOCK * (before + slot.index)}",
        )
        for slot, launch in zip(slots, launches, strict=True)
    ]
