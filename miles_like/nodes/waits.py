"""Wait for Ray: time limits, stacks of processes that do not answer, one-sentence messages of failures."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles_like.nodes.members import cluster_gist
from miles_like.nodes.stacks import Stacks, read_stacks

_DEATH_IS_KNOWN_S = 10.0  # time limit for Ray to report a dead process; takes 1 s on an idle machine
_NODE_IS_LOST_S = 40.0  # and for a dead node, after five of its checks, 3 s apart; 15 to 20 s on an idle machine
_OF_A_PEER = re.compile(r"connection|broken pipe|ncclRemoteError", re.IGNORECASE)  # in errors of gloo and NCCL
_SLICE_S = 5.0
_STACKS_S = 60.0  # time limit for a task on each node to start and to see the stacks written


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


async def timed_out(answers: Sequence[asyncio.Future[Any]], limit: float) -> bool:
    """Wait until all calls have finished, one has failed, or `limit` seconds have passed; return whether the limit
    passed.

    Waits in slices, so that a driver which was suspended for an hour (by a batch system) loses one slice only.
    """
    waiting, left = set(answers), limit
    while waiting and left > 0:
        some = min(left, _SLICE_S)
        done, waiting = await asyncio.wait(waiting, timeout=some, return_when=asyncio.FIRST_EXCEPTION)
        if any(answer.exception() is not None for answer in done):
            return False
        left -= some
    return bool(waiting)


def ignore_exception(answer: asyncio.Future[Any]) -> None:
    """Mark a call's exception as retrieved, so that asyncio does not log it: another error is reported in its place."""
    if not answer.cancelled():
        answer.exception()


def write_stacks(nodes: Sequence[str], pids: Sequence[int], logs: Sequence[Path]) -> dict[int, Stacks]:
    """Send SIGUSR1, which each process has registered with faulthandler, so that its log gets its threads' stacks.

    nodes, pids, logs: one per process. Returns process number -> its stacks, without the processes of nodes that do not
    answer.
    """
    task: Any = ray.remote(num_cpus=0, max_retries=0)(read_stacks)
    every = list(zip(range(len(pids)), pids, logs, strict=False))
    refs = [
        task.options(scheduling_strategy=on_node(node)).remote([one for one in every if nodes[one[0]] == node])
        for node in sorted(set(nodes[: len(pids)]))
    ]
    out: dict[int, Stacks] = {}
    for ref in refs:
        with contextlib.suppress(RayError):
            found: dict[int, Stacks] = ray.get(ref, timeout=_STACKS_S)
            out |= found
    return out


def get_result(ref: ray.ObjectRef[Any], actor: str, timeout_s: float) -> Any:
    """`ray.get`, whose errors are RuntimeErrors that name the actor."""
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise RuntimeError(
            f"{actor} did not answer within {timeout_s:g} s; {cluster_gist()}: check that its node is up and not "
            "overloaded, and see logs/ in the run directory; then run again"
        ) from None
    except RayError as e:
        raise RuntimeError(f"{actor}: {error_message(e)}") from None


async def root_cause(error: RayError, answers: Sequence[asyncio.Future[Any]]) -> RayError:
    """The death of a worker, if there was one, in place of another rank's error about the lost connection, which may
    arrive first."""
    if not (limit := _limit_s(error)):
        return error
    deadline, waiting = time.monotonic() + limit, set(answers)
    while waiting and (left := deadline - time.monotonic()) > 0:
        done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        for answer in done:
            if isinstance(e := answer.exception(), RayActorError):
                return e
    return error


def _limit_s(error: RayError) -> float:
    """How long the death of another worker may still become known; 0: it is not the cause."""
    if not (isinstance(error, RayTaskError) and isinstance(error.cause, RuntimeError)):
        return 0.0
    return _NODE_IS_LOST_S if _OF_A_PEER.search(str(error.cause)) else _DEATH_IS_KNOWN_S


def first_cause(number: int, error: RayError, refs: Sequence[ray.ObjectRef[Any]]) -> tuple[int, RayError]:
    """As `root_cause`, without an event loop: (number of the call, its error). number: of the call that has failed."""
    if not (limit := _limit_s(error)):
        return number, error
    deadline, waiting = time.monotonic() + limit, list(refs)
    while waiting and (left := deadline - time.monotonic()) > 0:
        done, waiting = ray.wait(waiting, num_returns=1, timeout=left)
        for ref in done:
            try:
                with contextlib.suppress(RayTaskError):
                    ray.get(ref)
            except RayActorError as e:
                return list(refs).index(ref), e
    return number, error


def error_message(error: RayError) -> str:
    """A remote failure as one sentence; the traceback is in the actor's log."""
    if isinstance(error, RayTaskError):
        known = isinstance(error.cause, ValueError | RuntimeError | OSError)
        return str(error.cause) if known else repr(error.cause)
    if isinstance(error, RayActorError):
        return "a worker process died (killed, or out of memory): see logs/ in the run directory, then run again"
    return str(error)
