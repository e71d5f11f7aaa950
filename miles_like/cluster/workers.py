"""Start Ray; run trainer ranks and rollout servers as actors.

Rank actors get picklable factories, so that this module imports no concrete trainer or publisher.
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
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, TypedDict

import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from miles_like.batch.packing import cut_shard
from miles_like.cluster.call_deadlines import CallDeadlines, format_ranks
from miles_like.cluster.node_work import DEFAULT_TIMEOUT_S, living_nodes, node_ids
from miles_like.cluster.placement import PlacementPlan, Slot
from miles_like.cluster.rank import Place, PublisherFactory, Rank, TrainerFactory
from miles_like.cluster.ray_waits import (
    error_message,
    get_result,
    ignore_exception,
    on_node,
    root_cause,
    timed_out,
    write_stacks,
)
from miles_like.loop.stopping import end_in_order
from miles_like.types import PublishReport, Scored, StepReport, TrainBatch
from rollout.sglang.servers import ServerHandle, ServerLaunch, launch_server

_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
_before_local: dict[str, str | None] = {}  # values of _AUTH from before this process started a local Ray


class _Logging(TypedDict):
    """Keywords of ray.init that keep its own messages out of a run's output."""

    logging_level: int
    log_to_driver: bool


def start_ray(address: str | None) -> None:
    """Join the cluster at `address` or RAY_ADDRESS; without either start a local one for this process.

    A local one listens on loopback only and accepts only processes that hold its token, which is generated here. For a
    cluster, Ray's environment variables and token file apply unchanged. Raises ValueError when the cluster does not
    answer or refuses this process, RuntimeError when the local one does not start.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 would slow the training down
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # each rank has another environment: none is idle
    address = address or os.environ.get("RAY_ADDRESS")
    quiet: _Logging = {"logging_level": logging.ERROR, "log_to_driver": False}
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
    """Whether the error is Ray's authentication error, which it wraps in others."""
    return error is not None and (
        isinstance(error, AuthenticationError)
        or "InvalidAuthToken" in str(error)
        or _refused(error.__cause__ or error.__context__)
    )


def _start_local(quiet: _Logging) -> None:
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
    # Ray has read it and its processes have inherited it; other child processes must not
    os.environ.pop("RAY_AUTH_TOKEN", None)


def _apply_auth(values: Mapping[str, str | None]) -> None:
    """Set the variables in _AUTH, and make Ray, which read some of them at import, read them again.

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
    """Raises ValueError where nothing listens at HOST:PORT; Ray would retry for minutes and print a page."""
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "//" in address:
        return  # "auto" or a ray:// client address: left to Ray
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as e:
        raise ValueError(
            f"no Ray cluster answers at {address} ({e.strerror or e}): start one (`ray start --head`) or leave it out"
        ) from None


def stop_ray() -> None:
    """Leave the cluster, end a local one, and restore this process's environment."""
    ray.shutdown()
    if _before_local:
        _apply_auth(_before_local)
        _before_local.clear()


def gpus_of_nodes() -> list[int]:
    """GPUs that Ray assigns on each living node, in the order of `node_ids`."""
    nodes = sorted(living_nodes(), key=lambda n: str(n["NodeID"]))
    return [int(n["Resources"].get("GPU", 0)) for n in nodes]


def check_nodes(plan: PlacementPlan) -> None:
    """Raises ValueError when the placement needs more nodes than the cluster has."""
    have = len(node_ids())
    for slot in plan.slots:
        if slot.node >= have:
            raise ValueError(
                f"{slot.role} {slot.index} is placed on node {slot.node}; the Ray cluster has {have} nodes: "
                "start Ray on more, or lower cluster.nodes"
            )


_SHARE_OF_GPU = {"trainer": 0.6, "rollout": 0.4, "critic": 0.0}  # makes Ray put one of each on a GPU


class _ActorOptions(TypedDict):
    """Keywords of `options` of a Ray actor's class."""

    num_cpus: int
    num_gpus: float
    scheduling_strategy: NodeAffinitySchedulingStrategy
    runtime_env: dict[str, dict[str, str]]


def _options(slot: Slot) -> _ActorOptions:
    nodes = node_ids()
    # one thread per rank of a CPU run: the ranks share the cores
    environment = {"OMP_NUM_THREADS": "1"} if not slot.gpus else {}
    if slot.gpus and slot.role == "critic":  # on a trainer rank's GPU, all of which Ray has already assigned
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slot.gpus))
    if _before_local:  # a local Ray listens on loopback only, and so must gloo and NCCL
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        environment |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {
        "num_cpus": 0,
        "num_gpus": len(slot.gpus) * _SHARE_OF_GPU[slot.role],
        "scheduling_strategy": on_node(nodes[slot.node]),
        "runtime_env": {"env_vars": environment},
    }


def _log_to(path: Path) -> None:
    """Redirect stdout and stderr of this process to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def _free_address() -> tuple[str, int]:
    """(this node's address in the cluster, a port that is free on it now)."""
    host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.bind(address)
        return host, int(s.getsockname()[1])


class _Process:
    """Base of both actors: redirects the output to a log and makes SIGUSR1 write stacks to it."""

    def __init__(self, log: Path) -> None:
        _log_to(log)
        # faulthandler runs in C, so that it works where this process hangs and holds the interpreter lock
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        os.environ.pop("RAY_AUTH_TOKEN", None)  # Ray has read it; servers and subprocesses of users' code must not

    def address(self) -> tuple[str, int]:
        return _free_address()

    def pid(self) -> int:
        return os.getpid()


class _Rank(_Process, Rank):
    """One trainer rank."""


_ACTOR_S = 300.0  # time limit for Ray to start a process


class RayTrainer:
    """A `Trainer` whose ranks are Ray actors."""

    put = staticmethod(ray.put)  # for arguments that several ranks share

    def __init__(
        self,
        factory: TrainerFactory,
        slots: Sequence[Slot],
        dp_size: int,
        log_dir: Path,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Starts every rank and waits until all have built their model. Raises RuntimeError when one cannot.

        timeout_s: least time limit of a call (`CallDeadlines`). When ranks exceed the limit, every rank's stacks are
        written to its log, RuntimeError names the late ranks, and every further call raises it again.
        """
        self.dp_size = dp_size
        self._deadlines = CallDeadlines(timeout_s)
        self._stuck: str | None = None
        actor: Any = ray.remote(_Rank)
        self._role = slots[0].role
        self._slots = tuple(slots)
        self._logs = [(log_dir / f"{s.role}_rank{s.index}.log").resolve() for s in slots]
        self._pids: list[int] = []
        self._ranks = [actor.options(**_options(s)).remote(log) for s, log in zip(slots, self._logs, strict=True)]
        world = len(slots)
        self._pids = self._call_first("pid", [()] * world)
        ((host, port),) = self._call_first("address", [()])
        self._places: list[Place] = self._call_first("start", [(factory, i, world, host, port) for i in range(world)])
        self._version = 0

    def connect(self, factory: PublisherFactory) -> None:
        """Create every rank's publisher."""
        self._call_first("connect", [(factory,)] * len(self._ranks))

    def fingerprint(self) -> str | None:
        """A hash of the results of the ranks' kernels; None unless the trainer is deterministic."""
        (fingerprint,) = self._call_first("fingerprint", [()])
        return fingerprint if fingerprint is None else str(fingerprint)

    async def train(self, batches: Sequence[TrainBatch]) -> StepReport:
        """Adds the metric `routing/bytes`: bytes of routes put into the object store for these steps."""
        self._version += 1
        fixed = ([batch.loss_tokens for batch in batches], self._version)
        shipped, nbytes = zip(*(self._ship(batch) for batch in batches), strict=True)
        # references must be top-level arguments: Ray does not fetch nested ones
        reports = await self._all("train", [(*fixed, *chain(*refs)) for refs in zip(*shipped, strict=True)])
        report: StepReport = reports[0]
        if all(m.routing is None for batch in batches for shard in batch.grid for m in shard):
            return report
        return replace(report, metrics={**report.metrics, "routing/bytes": float(sum(nbytes))})

    async def evaluate(self, batch: TrainBatch) -> Mapping[str, float]:
        shipped, _ = self._ship(batch)
        answers = await self._all("evaluate", [(*refs, batch.loss_tokens) for refs in shipped])
        metrics: Mapping[str, float] = answers[0]
        return metrics

    async def score(self, batch: TrainBatch, *, temperature: float, replay: bool) -> list[tuple[int, Scored]]:
        """(its DP shard, its result) of every rank. Forward only."""
        shipped, _ = self._ship(batch)
        scores = await self._all("score", [(*refs, temperature, replay) for refs in shipped])
        return [(shard, scored) for (shard, _), scored in zip(self._places, scores, strict=True)]

    async def logprobs(
        self, batch: TrainBatch, *, weights: str | None = None, candidates: bool = False
    ) -> list[list[Tensor]]:
        """[dp][micro] of [T] fp32, or [T, C] with `candidates`. No routes are sent, because the ranks use their own
        routers. The first rank of each DP shard replies."""
        sent = [self.put([replace(m, routing=None) for m in shard]) for shard in batch.grid]
        shards = [shard for shard, _ in self._places]
        replies = [shards.index(shard) == i for i, shard in enumerate(shards)]
        arguments = [(sent[shard], weights, candidates, reply) for shard, reply in zip(shards, replies, strict=True)]
        answers = await self._all("logprobs", arguments)
        return [answers[shards.index(shard)] for shard in range(len(batch.grid))]

    async def load_copy(self, name: str, path: Path) -> None:
        await self._all("load_copy", [(name, path.resolve())] * len(self._ranks))

    async def publish(self, *, version: int) -> PublishReport:
        self._version = version
        report: PublishReport = (await self._all("publish", [(version,)] * len(self._ranks)))[0]
        return report

    async def save(self, path: Path, *, asynchronous: bool = False) -> None:
        await self._all("save", [(path.resolve(), asynchronous)] * len(self._ranks))

    async def finish_save(self, *, wait: bool) -> bool:
        return all(await self._all("finish_save", [(wait,)] * len(self._ranks)))

    async def load(self, path: Path, *, version: int | None = None) -> None:
        """version: the version of the loaded weights, if no publication follows."""
        await self._all("load", [(path.resolve(),)] * len(self._ranks))
        self._version = self._version if version is None else version

    async def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)

    def _ship(self, batch: TrainBatch) -> tuple[list[tuple[ray.ObjectRef[Any], ray.ObjectRef[Any]]], int]:
        """Put a batch into the object store: for each rank (its DP shard without routes, its part of the shard's
        routes), and the bytes of all those parts. Ranks that need the same shard or part share one object."""
        sent = [self.put([replace(m, routing=None) for m in shard]) for shard in batch.grid]
        cut = {(dp, part): cut_shard(batch.grid[dp], part) for dp, part in dict.fromkeys(self._places)}
        puts = {place: self.put(routes) for place, routes in cut.items()}
        nbytes = sum(r.nbytes for routes in cut.values() for r in routes if r is not None)
        return [(sent[place[0]], puts[place]) for place in self._places], nbytes

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        began, limit = self._begin_call(method)
        refs = [getattr(r, method).remote(*a) for r, a in zip(self._ranks, arguments, strict=True)]
        answers = [asyncio.ensure_future(ref) for ref in refs]
        for answer in answers:
            answer.add_done_callback(ignore_exception)
        try:
            if await timed_out(answers, limit):
                late = [i for i, answer in enumerate(answers) if not answer.done()]
                raise RuntimeError(await asyncio.to_thread(self._timeout_message, method, late, limit))
            for answer in answers:
                if answer.done():
                    answer.result()  # raises where it failed; the others may not have answered yet
            self._deadlines.note(method, time.monotonic() - began)
            return [answer.result() for answer in answers]
        except RayError as e:
            raise RuntimeError(f"{method}: {error_message(await root_cause(e, answers))}") from None
        finally:
            for answer in answers:
                answer.cancel()

    def _call_first(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """As `_all`, without an event loop, on the first `len(arguments)` ranks."""
        began, limit = self._begin_call(method)
        refs = [getattr(r, method).remote(*a) for r, a in zip(self._ranks, arguments, strict=False)]
        out: list[Any] = []
        for i, ref in enumerate(refs):
            try:
                out.append(ray.get(ref, timeout=max(0.0, began + limit - time.monotonic())))
            except GetTimeoutError:
                done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
                late = [j for j, other in enumerate(refs) if other not in done]
                raise RuntimeError(self._timeout_message(method, late, limit)) from None
            except RayError as e:
                raise RuntimeError(f"{self._role} rank {i}: {error_message(e)}") from None
        self._deadlines.note(method, time.monotonic() - began)
        return out

    def _begin_call(self, method: str) -> tuple[float, float]:
        """(current time, time limit) in seconds. Raises RuntimeError after an earlier call exceeded its limit."""
        if self._stuck is not None:
            raise RuntimeError(self._stuck)
        return time.monotonic(), self._deadlines.limit(method)

    def _timeout_message(self, method: str, late: list[int], limit: float) -> str:
        """Make all ranks write their stacks; return the message that names the late ones."""
        nodes = node_ids()
        states = write_stacks([nodes[slot.node] for slot in self._slots], self._pids, self._logs)
        stopped = [i for i, state in states.items() if state in "Tt"]
        which = f"; {format_ranks(stopped)} had been stopped by a signal" if stopped else ""
        stacks = f"the stacks of all are at the end of {self._logs[0].parent}/{self._role}_rank*.log"
        if not states:
            stacks = f"their stacks could not be written, see {self._logs[0].parent}"
        self._stuck = (
            f"{method}: {self._role} {format_ranks(late)} of {len(self._ranks)} did not answer within {limit:g} s"
            f"{which}: {stacks}; raise cluster.timeout_s if the work was only slow, and run again"
        )
        return self._stuck


class _Server(_Process):
    """Owns one rollout server process, which ends with this actor."""

    handle: ServerHandle | None = None

    def start(self, launch: ServerLaunch, host: str, dist_init_addr: str | None) -> str:
        self.handle = launch_server(replace(launch, host=host, dist_init_addr=dist_init_addr))
        return self.handle.url

    def stop(self) -> None:
        if self.handle is not None:  # None where the launch failed
            self.handle.stop()


class RayServers:
    """Rollout servers, each owned by an actor on its node."""

    def __init__(
        self, launches: Sequence[tuple[Slot, ServerLaunch]], log_dir: Path, start_timeout_s: float = 600.0
    ) -> None:
        """Begins to start all servers; `wait` returns once they answer. start_timeout_s: per try of a launch.

        On a cluster of several nodes a server listens on its node's address; the parts of a server that spans nodes
        connect to a port of its first node.
        """
        actor: Any = ray.remote(_Server)
        logs = [log_dir / f"rollout_actor{s.index}.{s.node_rank}.log" for s, _ in launches]
        self._actors = [
            actor.options(**_options(s)).remote(log.resolve()) for (s, _), log in zip(launches, logs, strict=True)
        ]
        self._heads = [s.node_rank == 0 for s, _ in launches]
        self._started = []
        # for an actor that hangs: a launch limits each of the free ports that it tries
        self._limit = 3 * start_timeout_s + _ACTOR_S
        hosts = [get_result(a.address.remote(), "a rollout actor", _ACTOR_S) for a in self._actors]
        first_nodes: dict[int, str] = {}  # server -> HOST:PORT of its first node
        for (slot, launch), server, (ip, port) in zip(launches, self._actors, hosts, strict=True):
            if slot.node_rank == 0:
                first_nodes[slot.index] = f"{ip}:{port}"
            host = ip if len(node_ids()) > 1 else "127.0.0.1"
            init = first_nodes[slot.index] if slot.nnodes > 1 else None
            self._started.append(server.start.remote(launch, host, init))

    def wait(self) -> list[str]:
        """URL of every server. Raises RuntimeError when one did not start."""
        urls = [get_result(ref, f"rollout server {i}", self._limit) for i, ref in enumerate(self._started)]
        return [url for url, head in zip(urls, self._heads, strict=True) if head]

    def stop(self) -> None:
        """Stop all servers. Never raises, because it may run while another error propagates; the server of a dead actor
        has ended with it."""
        for a in self._actors:
            with contextlib.suppress(RayError):
                ray.get(a.stop.remote(), timeout=30)
            ray.kill(a)
