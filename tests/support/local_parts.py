"""The parts of a run that are stand-ins where it is on plain processes (tests/support/local_run.py), and its launcher
of them."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_bridge.config import TrainerConfig
from miles_like.cluster.call_deadlines import CallDeadlines
from miles_like.cluster.factories import MegatronFactory
from miles_like.cluster.placement import Role, Slot
from miles_like.cluster.rank import Rank
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.nodes.waits import timed_out
from miles_like.protocols import LossFn
from miles_like.report.traces.writer import parts_of
from miles_like.run.setup.launcher import Launcher, observed
from miles_like.run.setup.model_plan import ModelPlan
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.teachers import TeacherPlaces
from miles_like.run.setup.worker_side import worker_recipe, worker_slots, workers_of
from miles_like.types import RanksLostError
from rollout.sglang.servers import ServerLaunch, embedded_command
from rollout.sglang.startup import Progress
from tests.support.forked import Forked, Gone
from tests.support.local_workers import LocalWorkers
from tests.support.spawn import free_port


class LocalServers:
    """As RayServers. spares: processes that take the place of those that are replaced."""

    def __init__(
        self,
        processes: Sequence[Forked],
        arguments: Sequence[Sequence[str]],
        ports: Sequence[int],
        spares: Sequence[Forked] = (),
    ) -> None:
        self._processes, self._ports, self._spares = list(processes), list(ports), list(spares)
        self._words, self._halted = list(arguments), set[int]()
        for i in range(len(processes)):
            self._begin(i)

    def _begin(self, i: int) -> None:
        self._processes[i]._line.send_bytes(pickle.dumps(("serve", (self._words[i],))))

    def wait(self, say: Any = None) -> list[str]:
        for i in range(len(self._ports)):
            self._wait(i)
        return [self._url(i) for i in range(len(self._ports))]

    def _wait(self, i: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._ports[i]), timeout=5).close()
                return
            except ConnectionRefusedError:
                if self._processes[i]._line.poll() or time.monotonic() > deadline:
                    raise RuntimeError(f"{self._processes[i].label} did not come up: its log says why") from None
                time.sleep(0.01)

    def _url(self, i: int) -> str:
        return f"http://127.0.0.1:{self._ports[i]}"

    def replace(self, urls: Collection[str], say: Any = None) -> None:
        for number in [i for i in range(len(self._ports)) if self._url(i) in urls]:
            self.restart(number)
            self._wait(number)

    def ended(self, url: str) -> bool:
        return any(process.ended for i, process in enumerate(self._processes) if self._url(i) == url)

    # ---- as RayServers, of a run that goes on without some of its servers

    def deaths(self) -> dict[int, str]:
        return {
            i: f"{process.label} has ended"
            for i, process in enumerate(self._processes)
            if i not in self._halted and process.ended
        }

    def halt(self, number: int) -> None:
        self._halted.add(number)
        self._processes[number].kill()

    def restart(self, number: int) -> None:
        self.halt(number)
        if not self._spares:
            raise RuntimeError(f"rollout server {number} does not start: no process is left")
        self._processes[number] = self._spares.pop(0)
        self._begin(number)
        self._halted.discard(number)

    def living(self) -> list[int]:
        return [0]

    def look(self, number: int) -> Progress:
        url, process = self._url(number), self._processes[number]
        if process.ended:
            return Progress(url, "starting", failure=f"{process.label} has ended")
        try:
            socket.create_connection(("127.0.0.1", self._ports[number]), timeout=5).close()
        except ConnectionRefusedError:
            return Progress(url, "starting")
        return Progress(url, "ready", ready=True)

    def add(self, slot: Slot, launch: ServerLaunch) -> None:
        if not self._spares:
            raise RuntimeError("no process is left for another server")
        self._ports.append(free_port())
        self._words.append(_words(launch, self._ports[-1]))
        self._processes.append(self._spares.pop(0))
        self._begin(slot.index)

    def naming_failures(self) -> Any:
        return contextlib.nullcontext()

    def stop(self) -> None:
        for process in (*self._processes, *self._spares):
            process.kill()


_START_S = 600.0  # of ranks that start on a busy machine
_ANSWER_S = 3.0  # of the other ranks, once one has failed


class LocalTrainer(RayTrainer):
    """RayTrainer, whose ranks are called through pipes. calls: a file that lists its calls, "ROLE METHOD VERSION", of
    which only publications have a version."""

    put = staticmethod(lambda value: value)  # type: ignore[assignment]

    def __init__(
        self, factory: Any, ranks: Sequence[Forked], dp_size: int, role: Role, calls: Path, timeout_s: float = 1800.0
    ) -> None:
        """timeout_s: as cluster.timeout_s, of calls after "start"."""
        self._deadlines = CallDeadlines(timeout_s)
        self.dp_size, self._ranks, self._version = dp_size, list(ranks), 0
        self.under_way, self._role, self._calls = "start", role, calls
        self._one_at_a_time = asyncio.Lock()  # as actors, which begin calls in the order in which they are sent
        self._addresses = ["127.0.0.1"] * len(ranks)
        port, world = free_port(), len(ranks)
        started = [(factory, i, world, "127.0.0.1", port) for i in range(world)]
        self._places = asyncio.run(self._all("start", started))

    def connect(self, factory: Any) -> None:
        for i in range(len(self._ranks)):
            self._one(i, "connect", factory)

    def fingerprint(self) -> str | None:
        found: str | None = self._one(0, "fingerprint")
        return found

    def _one(self, i: int, method: str, *arguments: Any) -> Any:
        try:
            return self._ranks[i].call(method, *arguments)
        except Gone as e:
            raise self._lost_error(method, [self._lost_rank(i, str(e))]) from None

    async def close(self) -> None:
        self.end()

    def end(self) -> list[str]:
        self._closed = True
        for rank in self._ranks:
            rank.kill()
        return []

    async def lost(self) -> RanksLostError:
        while self._closed or not (dead := [i for i, rank in enumerate(self._ranks) if rank.ended]):
            await asyncio.sleep(0.01)
        return self._lost_error(None, [self._lost_rank(i, "its process died") for i in dead])

    async def _given(
        self, method: str, arguments: Sequence[tuple[Any, ...]], counts: Sequence[int]
    ) -> list[Sequence[Any]]:
        return await self._all("sealed", [(method, own) for own in arguments])

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        async with self._one_at_a_time:
            return await self._call_all(method, arguments)

    async def _call_all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self._calls.open("a") as out:
            print(self._role, method, *(arguments[0] if method == "publish" else ()), file=out)
        self.under_way = method
        asked = [
            asyncio.ensure_future(asyncio.to_thread(rank.call, method, *a))
            for rank, a in zip(self._ranks, arguments, strict=True)
        ]
        began, limit = time.monotonic(), _START_S if method == "start" else self._deadlines.limit(method)
        hangs = await timed_out(asked, limit)
        late = {a for a in asked if not a.done()}
        if late and not hangs:  # those that wait for a rank which died, outside of a collective
            await asyncio.wait(late, timeout=_ANSWER_S)
        errors = [e for a in asked if a.done() and (e := a.exception()) is not None]
        late_ones = [i for i, a in enumerate(asked) if not a.done()]
        if not all(a.done() for a in asked):
            await self.close()
            await asyncio.wait(asked)
        self.under_way = "rollout"
        if hangs:
            why = f"did not answer within {limit:g} s"
            raise self._lost_error(method, [self._lost_rank(i, why) for i in late_ones])
        gone = [i for i, a in enumerate(asked) if isinstance(a.exception(), Gone) and i not in late_ones]
        if gone:
            raise self._lost_error(method, [self._lost_rank(i, "its process died") for i in gone])
        for e in errors:
            raise e
        self._deadlines.note(method, time.monotonic() - began)
        return [a.result() for a in asked]


class SealingRank(Rank):
    """A rank whose parcels the driver does not open on their way."""

    def sealed(self, method: str, arguments: Sequence[Any]) -> list[bytes]:
        found = getattr(self, method)(*arguments)
        return [] if found is None else [pickle.dumps(parcel) for parcel in found[1:]]


class LocalLauncher(Launcher):
    """A Launcher whose processes are already there."""

    def __init__(
        self,
        ranks: Mapping[str, Sequence[Forked]],
        servers: Sequence[Forked],
        spares: Sequence[Forked] = (),
        spare_ranks: Sequence[Mapping[str, Sequence[Forked]]] = (),
        starts: Callable[[Sequence[Forked]], None] = lambda ranks: None,
    ) -> None:
        """ranks: by their role. spares: as of LocalServers. spare_ranks: those that are started after a loss. starts:
        called with the ranks of a role before they are."""
        self.server_processes, self.spares, self.starts = servers, spares, starts
        self.rank_processes = {role: [of, *(later[role] for later in spare_ranks)] for role, of in ranks.items()}

    def check(self, plan: ModelPlan) -> None:
        """There is no Ray cluster."""

    def replace_lost_nodes(self, plan: ModelPlan) -> tuple[frozenset[int], frozenset[int]]:
        return frozenset(), frozenset()

    def clocks(self, plan: ModelPlan) -> Sequence[Callable[[], tuple[str, int]]]:
        return ()

    def ranks(self, plan: ModelPlan, slots: Sequence[Slot], config: TrainerConfig, loss: LossFn) -> RayTrainer:
        role = slots[0].role
        factory = MegatronFactory(config, plan.weights, loss, observed=observed(plan, role))
        processes = self.rank_processes[role].pop(0)
        self.starts(processes)
        c, calls = plan.config, plan.run_dir / "calls.txt"
        return LocalTrainer(factory, processes, c.parallel.dp, role, calls, c.cluster.timeout_s)

    def workers(self, rollout: RolloutSide, urls: Mapping[int, str], teachers: TeacherPlaces, *, goes_on: bool) -> Any:
        """In the driver's process."""
        n = workers_of(rollout.plan)
        shares = [[urls[s] for s in own] for _, own in worker_slots(rollout.plan.placement, n)] if n else []
        recipe = worker_recipe(rollout, [*urls.values()], teachers, goes_on=goes_on)
        return LocalWorkers(shares, recipe) if n else None

    def servers(self, rollout: RolloutSide, version: int, *, routing: bool = True) -> Any:
        plan, ports = rollout.plan, [free_port() for _ in self.server_processes]
        launch = ServerLaunch(
            model_path=plan.served.resolve(),
            config=plan.config.rollout,
            log_dir=plan.logs,
            weight_version=version,
            activations=plan.config.precision.activations,
            exact=plan.config.tp_shards,
            return_routed_experts=routing and plan.model.routing is not None,
            traces=parts_of(plan.run_dir) if plan.config.trace.on else None,
        )
        words = [_words(launch, port) for port in ports]
        return LocalServers(self.server_processes, words, ports, self.spares)


def _words(launch: ServerLaunch, port: int) -> list[str]:
    """Arguments of the embedded server."""
    command = embedded_command(launch, port)
    return command[command.index("rollout.embedded.server") + 1 :]
