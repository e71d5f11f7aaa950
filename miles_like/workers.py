"""Ray: trainer ranks and rollout servers as actors, one task a node for staging. The only file that imports ray.

What an actor runs is handed in as a picklable factory, so this file knows no concrete trainer, publisher or server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from miles_like.packing import cut_row
from miles_like.placement import PlacementPlan, Slot
from miles_like.stopping import end_in_order
from miles_like.trainer_rank import Place, PublisherFactory, Rank, TrainerFactory
from miles_like.types import PublishReport, Scored, StepReport, TrainBatch

ServerLaunch = Callable[[str, str | None], Any]  # (host to listen on, dist_init_addr) -> a handle with url and stop()


def start_ray(address: str | None) -> None:
    """Join the cluster at `address` (or Ray's own RAY_ADDRESS); without either start a local one for this process.

    Raises ValueError when the cluster does not answer.
    """
    if ray.is_initialized():
        return
    # the local cluster serves this process alone, on loopback
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the workers are the job, not a guest on the machine
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        ray.init(address="local", include_dashboard=False, object_store_memory=512 << 20, **quiet)
        end_in_order()
        return
    _check_answers(address)
    try:
        ray.init(address=address, **quiet)
        end_in_order()
    except (ConnectionError, RuntimeError) as e:
        raise ValueError(
            f"no Ray cluster answers at {address}: start one with `ray start --head`, or leave it out"
        ) from e


def _check_answers(address: str) -> None:
    """Ray itself would try for minutes, and say why in a page."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "//" in address:
        return  # "auto" or a ray:// client address: Ray's own business
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as e:
        raise ValueError(
            f"no Ray cluster answers at {address} ({e.strerror or e}): start one (`ray start --head`) or leave it out"
        ) from None


def stop_ray() -> None:
    ray.shutdown()


def node_ids() -> list[str]:
    """Ids of the cluster's living nodes; node number k of a placement is the k-th of them."""
    return sorted(n["NodeID"] for n in ray.nodes() if n["Alive"])


def check_nodes(plan: PlacementPlan) -> None:
    """Before anything is started: raises ValueError when the placement needs more nodes than the cluster has."""
    have = len(node_ids())
    for slot in plan.slots:
        if slot.node >= have:
            raise ValueError(
                f"{slot.role} {slot.index} belongs on node {slot.node}; the Ray cluster has {have} nodes: "
                "start Ray on more, or lower cluster.nodes"
            )


def on_every_node(work: Callable[[], Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Run `work` once on each node, all at once; their results in node order. The first failure is raised."""
    task = ray.remote(num_cpus=0)(_call)
    refs = [task.options(scheduling_strategy=_at(node)).remote(work) for node in node_ids()]
    return [_get(ref, "staging") for ref in refs]


def over_nodes(work: Callable[[int], None], numbers: Sequence[int], *, each: int) -> None:
    """`work(n)` for every number, in `each` processes on every node; a process takes neighbouring numbers, in order.

    The first failure stops the others and is raised as it was, once none of them writes any more.
    """
    nodes = [node for node in node_ids() for _ in range(each)]
    share = -(-len(numbers) // len(nodes))
    task = ray.remote(num_cpus=0, max_retries=0)(_do_all)
    job = ray.put(work)  # once, not with each task: it lists every piece of the checkpoint
    refs = [
        task.options(scheduling_strategy=_at(node)).remote(job, list(numbers[i * share : (i + 1) * share]))
        for i, node in enumerate(nodes)
        if i * share < len(numbers)
    ]
    left = list(refs)
    try:
        while left:
            [done], left = ray.wait(left, num_returns=1)
            ray.get(done)
    except RayTaskError as e:
        raise (e.cause if isinstance(e.cause, ValueError | OSError) else RuntimeError(_said(e))) from None
    except RayError as e:
        raise RuntimeError(f"{_said(e)}; what is converted is kept: run again") from None
    finally:
        for ref in left:
            ray.cancel(ref, force=True)
        if left:
            ray.wait(left, num_returns=len(left))


def _do_all(work: Callable[[int], None], numbers: Sequence[int]) -> None:
    for number in numbers:
        work(number)


def _call(work: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
    return work()


def _at(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


_DEATH_IS_KNOWN_S = 10.0  # Ray tells of a dead process within a second, on an idle machine
_SHARE_OF_GPU = {"trainer": 0.6, "rollout": 0.4, "critic": 0.0}  # for Ray, which then puts one of each on a GPU


def _options(slot: Slot) -> dict[str, Any]:
    nodes = node_ids()
    # ranks of a CPU run share two cores: one thread each, or they fight over them
    environment = {"OMP_NUM_THREADS": "1"} if not slot.gpus else {}
    if slot.gpus and slot.role == "critic":  # beside a trainer rank, on a GPU that Ray has given out whole
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slot.gpus))
    return {
        "num_cpus": 0,
        "num_gpus": len(slot.gpus) * _SHARE_OF_GPU[slot.role],
        "scheduling_strategy": _at(nodes[slot.node]),
        "runtime_env": {"env_vars": environment},
    }


def _log_to(path: Path) -> None:
    """Everything this actor process prints goes to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _free_address() -> tuple[str, int]:
    """This node's address in the cluster, and a port that is free on it now."""
    with socket.socket() as s:
        s.bind(("", 0))
        return ray.util.get_node_ip_address(), int(s.getsockname()[1])


class _Process:
    """What an actor of either kind does first."""

    def __init__(self, log: Path) -> None:
        _log_to(log)

    def address(self) -> tuple[str, int]:
        return _free_address()


class _Rank(_Process, Rank):
    """One trainer rank."""


class RayTrainer:
    """All trainer ranks as actors, seen as one `Trainer`."""

    put = staticmethod(ray.put)  # what several ranks are sent

    def __init__(self, factory: TrainerFactory, slots: Sequence[Slot], dp_size: int, log_dir: Path) -> None:
        """Starts every rank and waits until all have built their model. Raises RuntimeError when one cannot."""
        self.dp_size = dp_size
        actor = ray.remote(_Rank)
        self._who = slots[0].role
        logs = [log_dir / f"{s.role}_rank{s.index}.log" for s in slots]
        self._ranks = [actor.options(**_options(s)).remote(log.resolve()) for s, log in zip(slots, logs, strict=True)]
        host, port = _get(self._ranks[0].address.remote(), f"{self._who} rank 0")
        world = len(slots)
        started = [rank.start.remote(factory, i, world, host, port) for i, rank in enumerate(self._ranks)]
        self._places: list[Place] = [_get(ref, f"{self._who} rank {i}") for i, ref in enumerate(started)]
        self._version = 0

    def connect(self, factory: PublisherFactory) -> None:
        """Give every rank its publisher."""
        for i, rank in enumerate(self._ranks):
            _get(rank.connect.remote(factory), f"{self._who} rank {i}")

    def fingerprint(self) -> str | None:
        """Of the bits that its ranks compute; None unless it is deterministic."""
        fingerprint: str | None = _get(self._ranks[0].fingerprint.remote(), f"{self._who} rank 0")
        return fingerprint

    async def train(self, batches: Sequence[TrainBatch]) -> StepReport:
        """Adds `routing/bytes` to the ranks' metrics: of routes put into the object store for these steps."""
        self._version += 1
        fixed = ([batch.loss_tokens for batch in batches], self._version)
        shipped, nbytes = zip(*(self._ship(batch) for batch in batches), strict=True)
        # Ray fetches what is an argument itself
        reports = await self._all("train", [(*fixed, *chain(*refs)) for refs in zip(*shipped, strict=True)])
        report: StepReport = reports[0]
        if all(m.routing is None for batch in batches for row in batch.grid for m in row):
            return report
        return replace(report, metrics={**report.metrics, "routing/bytes": float(sum(nbytes))})

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, float]:
        shipped, _ = self._ship(batch)
        return (await self._all("evaluate", [(*refs, batch.loss_tokens) for refs in shipped]))[0]

    async def score(self, batch: TrainBatch, *, temperature: float, replay: bool) -> list[tuple[int, Scored]]:
        """(which row of the batch's grid it has, what it says of it) of every rank. Nothing changes."""
        shipped, _ = self._ship(batch)
        scores = await self._all("score", [(*refs, temperature, replay) for refs in shipped])
        return [(row, scored) for (row, _), scored in zip(self._places, scores, strict=True)]

    async def logprobs(
        self, batch: TrainBatch, *, weights: str | None = None, candidates: bool = False
    ) -> list[list[Tensor]]:
        """As `Trainer.logprobs`; the trainer's own routing, so no routes are sent. One rank of each row answers."""
        rows = [self.put([replace(m, routing=None) for m in row]) for row in batch.grid]
        places = [row for row, _ in self._places]
        tells = [places.index(row) == i for i, row in enumerate(places)]
        asked = [(rows[row], weights, candidates, t) for row, t in zip(places, tells, strict=True)]
        answers = await self._all("logprobs", asked)
        return [answers[places.index(row)] for row in range(len(batch.grid))]

    async def load_copy(self, name: str, path: Path) -> None:
        await self._all("load_copy", [(name, path.resolve())] * len(self._ranks))

    async def publish(self, *, version: int) -> PublishReport:
        self._version = version
        return (await self._all("publish", [(version,)] * len(self._ranks)))[0]

    async def save(self, path: Path, *, asynchronous: bool = False) -> None:
        await self._all("save", [(path.resolve(), asynchronous)] * len(self._ranks))

    async def finish_save(self, *, wait: bool) -> bool:
        return all(await self._all("finish_save", [(wait,)] * len(self._ranks)))

    async def load(self, path: Path, *, version: int | None = None) -> None:
        """`version`: of the weights there, where no publication will tell it."""
        await self._all("load", [(path.resolve(),)] * len(self._ranks))
        self._version = self._version if version is None else version

    async def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)

    def _ship(self, batch: TrainBatch) -> tuple[list[tuple[ray.ObjectRef, ray.ObjectRef]], int]:
        """Rank -> its row of the grid without routes, and the part of the row's routes that it needs; and the bytes of
        all those parts. Each row, and each part of a row's routes, is put once: ranks that need the same share it."""
        rows = [self.put([replace(m, routing=None) for m in row]) for row in batch.grid]
        cut = {(dp, part): cut_row(batch.grid[dp], part) for dp, part in dict.fromkeys(self._places)}
        puts = {place: self.put(routes) for place, routes in cut.items()}
        nbytes = sum(r.nbytes for routes in cut.values() for r in routes if r is not None)
        return [(rows[place[0]], puts[place]) for place in self._places], nbytes

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        refs = [getattr(r, method).remote(*a) for r, a in zip(self._ranks, arguments, strict=True)]
        answers = [asyncio.ensure_future(ref) for ref in refs]
        try:
            return list(await asyncio.gather(*answers))
        except RayError as e:
            raise RuntimeError(f"{method}: {_said(await _cause(e, answers))}") from None


class _Server(_Process):
    """Owns one rollout server process; it dies with this actor."""

    handle: Any = None

    def start(self, launch: ServerLaunch, host: str, dist_init_addr: str | None) -> str:
        self.handle = launch(host, dist_init_addr)
        return str(self.handle.url)

    def stop(self) -> None:
        if self.handle is not None:  # it may not have come up
            self.handle.stop()


class RayServers:
    """Rollout servers, each a process owned by an actor on its node."""

    def __init__(self, launches: Sequence[tuple[Slot, ServerLaunch]], log_dir: Path) -> None:
        """Starts all; `wait` returns when they answer.

        On a cluster of several nodes a server listens on its node's address, and one that spans nodes meets at a port
        of its first node.
        """
        actor = ray.remote(_Server)
        logs = [log_dir / f"rollout_actor{s.index}.{s.node_rank}.log" for s, _ in launches]
        self._actors = [
            actor.options(**_options(s)).remote(log.resolve()) for (s, _), log in zip(launches, logs, strict=True)
        ]
        self._heads = [s.node_rank == 0 for s, _ in launches]
        self._started = []
        hosts = [_get(a.address.remote(), "a rollout actor") for a in self._actors]
        meeting: dict[int, str] = {}  # server -> HOST:PORT of its first node
        for (slot, launch), actor_of, (ip, port) in zip(launches, self._actors, hosts, strict=True):
            if slot.node_rank == 0:
                meeting[slot.index] = f"{ip}:{port}"
            host = ip if len(node_ids()) > 1 else "127.0.0.1"
            init = meeting[slot.index] if slot.nnodes > 1 else None
            self._started.append(actor_of.start.remote(launch, host, init))

    def wait(self) -> list[str]:
        """URL of every server. Raises RuntimeError when one did not come up."""
        urls = [_get(ref, f"rollout server {i}") for i, ref in enumerate(self._started)]
        return [url for url, head in zip(urls, self._heads, strict=True) if head]

    def stop(self) -> None:
        """Never raises: it runs while another error is on its way. An actor that is gone took its server along."""
        for a in self._actors:
            with contextlib.suppress(RayError):
                ray.get(a.stop.remote(), timeout=30)
            ray.kill(a)


def _get(ref: ray.ObjectRef, who: str) -> Any:
    try:
        return ray.get(ref)
    except RayError as e:
        raise RuntimeError(f"{who}: {_said(e)}") from None


async def _cause(error: RayError, answers: Sequence[asyncio.Future[Any]]) -> RayError:
    """The death of a worker rather than what the others say of the connection they lost: they may hear of it first."""
    if not (isinstance(error, RayTaskError) and isinstance(error.cause, RuntimeError)):
        return error
    done, _ = await asyncio.wait(answers, timeout=_DEATH_IS_KNOWN_S)
    return next((e for a in done if isinstance(e := a.exception(), RayActorError)), error)


def _said(error: RayError) -> str:
    """The one sentence a user needs of a remote failure; the traceback is in the actor's log."""
    if isinstance(error, RayTaskError):
        known = isinstance(error.cause, ValueError | RuntimeError | OSError)
        return str(error.cause) if known else repr(error.cause)
    if isinstance(error, RayActorError):
        return "a worker process died (killed, or out of memory): see logs/ in the run directory, then run again"
    return str(error)
