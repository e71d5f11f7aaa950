"""Ray: starting it, and trainer ranks and rollout servers as actors. `node_work` and `ray_waits` import ray too.

What an actor runs is handed in as a picklable factory, so this file knows no concrete trainer, publisher or server.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError
from torch import Tensor

from miles_like.call_deadlines import CallDeadlines, listed
from miles_like.node_work import DEFAULT_TIMEOUT_S, node_ids
from miles_like.packing import cut_row
from miles_like.placement import PlacementPlan, Slot
from miles_like.ray_waits import answered, cause, get, looked_at, on_node, said, write_stacks
from miles_like.stopping import end_in_order
from miles_like.trainer_rank import Place, PublisherFactory, Rank, TrainerFactory
from miles_like.types import PublishReport, Scored, StepReport, TrainBatch

ServerLaunch = Callable[[str, str | None], Any]  # (host to listen on, dist_init_addr) -> a handle with url and stop()


_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
_before_local: dict[str, str | None] = {}  # of _AUTH, from before this process started a local Ray


def start_ray(address: str | None) -> None:
    """Join the cluster at `address` (or Ray's own RAY_ADDRESS); without either start a local one for this process.

    A local one listens on loopback only and admits only processes that hold its token, which is made here. How a
    cluster authenticates is its owner's decision: Ray's own environment variables and token file apply unchanged.
    Raises ValueError when the cluster does not answer or refuses this process, RuntimeError when the local one does
    not start.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the workers are the job, not a guest on the machine
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address is None:
        _start_local(quiet)
        end_in_order()
        return
    _check_answers(address)
    try:
        ray.init(address=address, **quiet)
        end_in_order()
    except (AuthenticationError, ConnectionError, RuntimeError) as e:
        if _refused(e):
            raise ValueError(
                f"the Ray cluster at {address} refuses this process's token: give the cluster's own, as "
                "RAY_AUTH_MODE=token with RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
            ) from e
        raise ValueError(
            f"no Ray cluster answers at {address}: start one with `ray start --head`, or leave it out"
        ) from e


def _refused(error: BaseException | None) -> bool:
    """Ray wraps it, and says it in the words of the innermost."""
    return error is not None and (
        isinstance(error, AuthenticationError)
        or "InvalidAuthToken" in str(error)
        or _refused(error.__cause__ or error.__context__)
    )


def _start_local(quiet: Mapping[str, Any]) -> None:
    """Raises RuntimeError, with no process left, when Ray does not start."""
    _before_local.update({name: os.environ.get(name) for name in _AUTH})
    _apply_auth(
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    )
    try:
        ray.init(address="local", include_dashboard=False, object_store_memory=512 << 20, **quiet)
    except Exception as e:  # Ray raises a plain Exception for a node that does not start in time
        stop_ray()
        reason = " ".join((str(e).splitlines() or [type(e).__name__])[0].split())
        raise RuntimeError(
            f"Ray did not start on this machine ({reason}): its logs are in /tmp/ray/session_latest/logs; free memory "
            "and processors and run again, or join a running cluster with --ray-address"
        ) from e
    # Ray has read it and its processes have inherited it: no other child of this process needs it
    os.environ.pop("RAY_AUTH_TOKEN", None)


def _apply_auth(values: Mapping[str, str | None]) -> None:
    """Set the variables in _AUTH, and have Ray, which read some of them when it was imported, read them again.

    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 makes every process of Ray 2.60 listen on 127.0.0.1, on Linux too
    (`_node_ip_address="127.0.0.1"` does not: Ray resolves it back to the machine's address).
    """
    for name in _AUTH:
        value = values.get(name)
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    ray_constants.ENABLE_RAY_CLUSTER = values.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") != "0"
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


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
    """Leave the cluster, and end a local one; this process's environment is as it was before it."""
    ray.shutdown()
    if _before_local:
        _apply_auth(_before_local)
        _before_local.clear()


def gpus_of_nodes() -> list[int]:
    """GPUs that Ray gives out on each living node, in the order of `node_ids`."""
    alive = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: str(n["NodeID"]))
    return [int(n["Resources"].get("GPU", 0)) for n in alive]


def check_nodes(plan: PlacementPlan) -> None:
    """Before anything is started: raises ValueError when the placement needs more nodes than the cluster has."""
    have = len(node_ids())
    for slot in plan.slots:
        if slot.node >= have:
            raise ValueError(
                f"{slot.role} {slot.index} belongs on node {slot.node}; the Ray cluster has {have} nodes: "
                "start Ray on more, or lower cluster.nodes"
            )


_SHARE_OF_GPU = {"trainer": 0.6, "rollout": 0.4, "critic": 0.0}  # for Ray, which then puts one of each on a GPU


def _options(slot: Slot) -> dict[str, Any]:
    nodes = node_ids()
    # ranks of a CPU run share two cores: one thread each, or they fight over them
    environment = {"OMP_NUM_THREADS": "1"} if not slot.gpus else {}
    if slot.gpus and slot.role == "critic":  # beside a trainer rank, on a GPU that Ray has given out whole
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slot.gpus))
    if _before_local:  # Ray of this machine alone: what gloo and NCCL listen on is this machine's business alone too
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {
        "num_cpus": 0,
        "num_gpus": len(slot.gpus) * _SHARE_OF_GPU[slot.role],
        "scheduling_strategy": on_node(nodes[slot.node]),
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
    host = ray.util.get_node_ip_address()
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.bind(address)
        return host, int(s.getsockname()[1])


class _Process:
    """What an actor of either kind does first."""

    def __init__(self, log: Path) -> None:
        _log_to(log)
        # by the kernel's signal and in C: also where this process hangs and holds the interpreter
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray has read it; servers and what users' code starts do not need it

    def address(self) -> tuple[str, int]:
        return _free_address()

    def pid(self) -> int:
        return os.getpid()


class _Rank(_Process, Rank):
    """One trainer rank."""


_ACTOR_S = 300.0  # for Ray to start a process


class RayTrainer:
    """All trainer ranks as actors, seen as one `Trainer`."""

    put = staticmethod(ray.put)  # what several ranks are sent

    def __init__(
        self,
        factory: TrainerFactory,
        slots: Sequence[Slot],
        dp_size: int,
        log_dir: Path,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Starts every rank and waits until all have built their model. Raises RuntimeError when one cannot.

        timeout_s: what any call may take at least; after long ones ten times as much as the longest of its name. Ranks
        that have not answered by then are given up: every rank's stacks are written to its log, RuntimeError names
        them, and no further call is made.
        """
        self.dp_size = dp_size
        self._deadlines = CallDeadlines(timeout_s)
        self._stuck: str | None = None
        actor = ray.remote(_Rank)
        self._who = slots[0].role
        self._slots = tuple(slots)
        self._logs = [(log_dir / f"{s.role}_rank{s.index}.log").resolve() for s in slots]
        self._pids: list[int] = []
        self._ranks = [actor.options(**_options(s)).remote(log) for s, log in zip(slots, self._logs, strict=True)]
        world = len(slots)
        self._pids = self._each("pid", [()] * world)
        ((host, port),) = self._each("address", [()])
        self._places: list[Place] = self._each("start", [(factory, i, world, host, port) for i in range(world)])
        self._version = 0

    def connect(self, factory: PublisherFactory) -> None:
        """Give every rank its publisher."""
        self._each("connect", [(factory,)] * len(self._ranks))

    def fingerprint(self) -> str | None:
        """Of the bits that its ranks compute; None unless it is deterministic."""
        (fingerprint,) = self._each("fingerprint", [()])
        return fingerprint if fingerprint is None else str(fingerprint)

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
        began, limit = self._begun(method)
        refs = [getattr(r, method).remote(*a) for r, a in zip(self._ranks, arguments, strict=True)]
        answers = [asyncio.ensure_future(ref) for ref in refs]
        for answer in answers:
            answer.add_done_callback(looked_at)
        try:
            if await answered(answers, limit):
                late = [i for i, answer in enumerate(answers) if not answer.done()]
                raise RuntimeError(await asyncio.to_thread(self._give_up, method, late, limit))
            for answer in answers:
                if answer.done():
                    answer.result()  # raises where it failed; the others may not have answered yet
            self._deadlines.note(method, time.monotonic() - began)
            return [answer.result() for answer in answers]
        except RayError as e:
            raise RuntimeError(f"{method}: {said(await cause(e, answers))}") from None
        finally:
            for answer in answers:
                answer.cancel()

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `_all`, where there is no event loop yet; of the first ranks, as many as there are arguments."""
        began, limit = self._begun(method)
        refs = [getattr(r, method).remote(*a) for r, a in zip(self._ranks, arguments, strict=False)]
        out: list[Any] = []
        for i, ref in enumerate(refs):
            try:
                out.append(ray.get(ref, timeout=max(0.0, began + limit - time.monotonic())))
            except GetTimeoutError:
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
                late = [j for j, other in enumerate(refs) if other not in done]
                raise RuntimeError(self._give_up(method, late, limit)) from None
            except RayError as e:
                raise RuntimeError(f"{self._who} rank {i}: {said(e)}") from None
        self._deadlines.note(method, time.monotonic() - began)
        return out

    def _begun(self, method: str) -> tuple[float, float]:
        """Now, and the limit, in seconds. Raises RuntimeError where the ranks were given up before."""
        if self._stuck is not None:
            raise RuntimeError(self._stuck)
        return time.monotonic(), self._deadlines.limit(method)

    def _give_up(self, method: str, late: list[int], limit: float) -> str:
        """Have all ranks write their stacks; the sentence that names the late ones."""
        nodes = node_ids()
        states = write_stacks([nodes[slot.node] for slot in self._slots], self._pids, self._logs)
        stopped = [i for i, state in states.items() if state in "Tt"]
        which = f"; {listed(stopped)} had been stopped by a signal" if stopped else ""
        stacks = f"the stacks of all are at the end of {self._logs[0].parent}/{self._who}_rank*.log"
        if not states:
            stacks = f"their stacks could not be had, see {self._logs[0].parent}"
        self._stuck = (
            f"{method}: {self._who} {listed(late)} of {len(self._ranks)} did not answer within {limit:g} s{which}: "
            f"{stacks}; raise cluster.timeout_s if the work was only slow, and run again"
        )
        return self._stuck


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

    def __init__(
        self, launches: Sequence[tuple[Slot, ServerLaunch]], log_dir: Path, start_timeout_s: float = 600.0
    ) -> None:
        """Starts all; `wait` returns when they answer, or raises when they have not in `start_timeout_s` a try.

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
        # a launch has a limit of its own, for each of the free ports that it tries; this is for an actor that hangs
        self._limit = 3 * start_timeout_s + _ACTOR_S
        hosts = [get(a.address.remote(), "a rollout actor", _ACTOR_S) for a in self._actors]
        meeting: dict[int, str] = {}  # server -> HOST:PORT of its first node
        for (slot, launch), actor_of, (ip, port) in zip(launches, self._actors, hosts, strict=True):
            if slot.node_rank == 0:
                meeting[slot.index] = f"{ip}:{port}"
            host = ip if len(node_ids()) > 1 else "127.0.0.1"
            init = meeting[slot.index] if slot.nnodes > 1 else None
            self._started.append(actor_of.start.remote(launch, host, init))

    def wait(self) -> list[str]:
        """URL of every server. Raises RuntimeError when one did not come up."""
        urls = [get(ref, f"rollout server {i}", self._limit) for i, ref in enumerate(self._started)]
        return [url for url, head in zip(urls, self._heads, strict=True) if head]

    def stop(self) -> None:
        """Never raises: it runs while another error is on its way. An actor that is gone took its server along."""
        for a in self._actors:
            with contextlib.suppress(RayError):
                ray.get(a.stop.remote(), timeout=30)
            ray.kill(a)
