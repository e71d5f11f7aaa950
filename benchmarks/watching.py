"""What a driver with 64 servers, a rollout worker for each, and 128 ranks spends on watching them in a step of 100 s.

Stand-ins answer instantly, so that only the driver's own work counts: processor time of its process with all of its
threads, less that of an event loop which waits as long. Periods are shortened by the same factor as the step
(--seconds), so that all beats of a step are made. Measured one after the other:

- `health`: looks at /health of 64 servers, and the rest of what their fleet does beside the loop (`fleet/fleet.py`).
- `servers`: looks at the processes of 64 servers over Ray (`cluster/rollout_servers.RayServers.deaths`).
- `ranks`: looks at what Ray has reported of 128 ranks (`cluster/lost/processes.first_deaths`).

- `pulse`: the signs of life of 64 rollout workers (`cluster/workers/actors.Pulse`), each with a call that waits.
- `call`: the deadline of one call to 128 ranks that lasts the whole step (`nodes/waits.timed_out`).
- `epoch`: looks at the epoch of the run directory before writes and requests (`storage/fencing.Fence.check`), on this
  machine's temporary directory; CHECKS of them.

Ray is real, on this machine, with two actors in the place of all; what it does in other processes is not counted.

Goals: all of it < 2 % of the step, and < 0.5 % for what watches and beats: all but `epoch`.

    python benchmarks/watching.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
from figures import add_write, finish
from rich.console import Console
from rich.table import Table

from miles_like.cluster.lost import processes
from miles_like.cluster.placement import Slot
from miles_like.cluster.rollout_servers import RayServers
from miles_like.cluster.workers.actors import Pulse
from miles_like.fleet.control import ControlFiles
from miles_like.fleet.fleet import Fleet
from miles_like.fleet.roster import Roster
from miles_like.nodes import waits
from miles_like.nodes.session import start_ray, stop_ray
from miles_like.storage.fencing import Fence
from rollout.episodes.serving import Serving

SERVERS, RANKS, STEP_S, CHECKS = 64, 128, 100.0, 1000
BEAT_S, SILENT_S = 15.0, 600.0
TICK_S, HEALTH_S = 1.0, 5.0  # of a fleet
GOALS = {"share_max": 0.02, "watch_share_max": 0.005}


async def answers(*_: object) -> int:
    return 0


async def pulses(seconds: float) -> None:
    """Each worker has a call under way; the workers' signs of life come at once."""
    factor = STEP_S / seconds
    worker = SimpleNamespace(pid=SimpleNamespace(remote=answers))
    watched = [Pulse(worker, SILENT_S, lambda: "", every_s=BEAT_S / factor) for _ in range(SERVERS)]
    await asyncio.gather(*(pulse.answer(asyncio.sleep(seconds)) for pulse in watched))
    for pulse in watched:
        assert pulse._watching is not None
        pulse._watching.cancel()


class Unharmed:
    """Processes of servers (`fleet.Processes`), of which none ends."""

    def deaths(self) -> dict[int, str]:
        return {}


def answer_health(listening: socket.socket) -> None:
    """The process of all servers."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def serve() -> None:
        async with await asyncio.start_server(answer, sock=listening) as server:
            await server.serve_forever()

    asyncio.run(serve())


async def health(seconds: float, port: int) -> None:
    factor = STEP_S / seconds
    urls = [f"http://127.0.0.{1 + k}:{port}" for k in range(SERVERS)]
    with tempfile.TemporaryDirectory() as where:
        fleet = Fleet(
            roster=Roster(limit=3, window_s=3600.0, least=1, say=lambda text: None),
            processes=Unharmed(),  # type: ignore[arg-type]
            serving=Serving(urls, lambda url, error: None, limit_s=60.0),
            files=ControlFiles(Path(where)),
            needs_trainer=True,
            health_every_s=HEALTH_S / factor,
            health_timeout_s=30.0,
            tick_s=TICK_S / factor,
        )
        fleet.begin(urls, 1)
        await fleet.beside(asyncio.sleep(seconds))


class StandIn:
    """The actor of a server."""

    async def await_end(self) -> None:
        await asyncio.Event().wait()


def watched_servers() -> RayServers:
    actors = [ray.remote(StandIn).options(num_cpus=0).remote() for _ in range(2)]
    servers = object.__new__(RayServers)
    servers._slots = [Slot(role="rollout", index=k, node=0, gpus=()) for k in range(SERVERS)]
    servers._actors, servers._names = [actors[k % 2] for k in range(SERVERS)], [f"server {k}" for k in range(SERVERS)]
    servers._ready, servers._halted, servers._ends = set(range(SERVERS)), set(), {}
    assert not servers.deaths()
    return servers


async def server_deaths(seconds: float, servers: RayServers) -> None:
    end, every = time.monotonic() + seconds, TICK_S * seconds / STEP_S
    while time.monotonic() < end:
        assert not await asyncio.to_thread(servers.deaths)
        await asyncio.sleep(every)


async def rank_deaths(seconds: float, servers: RayServers) -> None:
    """With the actors of servers in the place of ranks."""
    processes.LOOK_S = 0.5 * seconds / STEP_S
    ranks = [servers._actors[k % len(servers._actors)] for k in range(RANKS)]
    await asyncio.wait({asyncio.ensure_future(processes.first_deaths(ranks))}, timeout=seconds)


async def call(seconds: float) -> None:
    waits._SLICE_S = 5.0 * seconds / STEP_S
    ranks = [asyncio.ensure_future(asyncio.sleep(seconds)) for _ in range(RANKS)]
    assert not await waits.timed_out(ranks, 2 * seconds)


def processor_s(work: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Of `work`, which waits for `seconds`, beyond those of an event loop that only waits."""

    async def idle() -> None:
        await asyncio.sleep(seconds)

    async def run() -> float:
        before = time.process_time()
        await idle()
        middle = time.process_time()
        await work()
        return (time.process_time() - middle) - (middle - before)

    return max(asyncio.run(run()), 0.0)


def epochs(where: Path) -> float:
    fence = Fence.begin(where)
    before = time.process_time()
    for _ in range(CHECKS):
        fence.check()
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=STEP_S, help="of the shortened step")
    options = parser.parse_args()
    seconds = 5.0 if options.quick else options.seconds
    listening = socket.create_server(("", 0), backlog=SERVERS)
    answering = multiprocessing.get_context("fork").Process(target=answer_health, args=(listening,), daemon=True)
    answering.start()
    start_ray(None)
    servers, port = watched_servers(), listening.getsockname()[1]
    works: dict[str, Callable[[float], Any]] = {
        "health": lambda seconds: health(seconds, port),
        "servers": lambda seconds: server_deaths(seconds, servers),
        "ranks": lambda seconds: rank_deaths(seconds, servers),
        "pulse": pulses,
        "call": call,
    }
    found = {name: processor_s(lambda work=work: work(seconds), seconds) for name, work in works.items()}  # type: ignore[misc]
    stop_ray()
    answering.kill()
    with tempfile.TemporaryDirectory() as home:
        found["epoch"] = epochs(Path(home))
    figures = {f"{name}_s": value for name, value in found.items()}
    figures["share"] = sum(found.values()) / STEP_S
    figures["watch_share"] = figures["share"] - found["epoch"] / STEP_S
    table = Table("figure", "value", title=f"a step of {STEP_S:g} s, {SERVERS} servers, {RANKS} ranks")
    for name, value in figures.items():
        table.add_row(name, f"{value:.5f}")
    Console().print(table)
    holds = figures["share"] <= GOALS["share_max"] and figures["watch_share"] <= GOALS["watch_share_max"]
    finish("watching", figures, GOALS, holds)


if __name__ == "__main__":
    main()
