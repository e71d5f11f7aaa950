"""Waiting for Ray: deadlines, the stacks of processes that do not answer, one sentence for each kind of failure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_DEATH_IS_KNOWN_S = 10.0  # Ray tells of a dead process within a second, on an idle machine
_SLICE_S = 5.0
_STACKS_S = 60.0  # for a task on each node to start and to see them written


def on_node(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


async def answered(answers: Sequence[asyncio.Future[Any]], limit: float) -> bool:
    """Wait until all have answered, one has failed, or `limit` seconds were waited; True: that is why it ended.

    Waited in slices, of which a driver that was itself suspended for an hour (a batch system does that) loses one.
    """
    waiting, left = set(answers), limit
    while waiting and left > 0:
        some = min(left, _SLICE_S)
        done, waiting = await asyncio.wait(waiting, timeout=some, return_when=asyncio.FIRST_EXCEPTION)
        if any(answer.exception() is not None for answer in done):
            return False
        left -= some
    return bool(waiting)


def looked_at(answer: asyncio.Future[Any]) -> None:
    """Another answer's failure or the deadline is reported in its place: asyncio need not log it."""
    if not answer.cancelled():
        answer.exception()


def write_stacks(nodes: Sequence[str], pids: Sequence[int], logs: Sequence[Path]) -> dict[int, str]:
    """Have processes write the stacks of their threads to their logs; each registered SIGUSR1 with faulthandler.

    nodes, pids, logs: of each process. Returns by its number the state that it was in, a letter of Linux's /proc
    ("T": stopped by a signal; "?": gone), without the processes of nodes that do not answer.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(_signal_for_stacks)
    every = list(zip(range(len(pids)), pids, logs, strict=False))
    refs = [
        task.options(scheduling_strategy=on_node(node)).remote([one for one in every if nodes[one[0]] == node])
        for node in sorted(set(nodes[: len(pids)]))
    ]
    out: dict[int, str] = {}
    for ref in refs:
        with contextlib.suppress(RayError):
            out |= ray.get(ref, timeout=_STACKS_S)
    return out


def _signal_for_stacks(asked: Sequence[tuple[int, int, Path]]) -> dict[int, str]:
    """On the processes' node. One that a signal has stopped is let go on, for it writes nothing before."""
    states, sizes = {}, {}
    for i, pid, log in asked:
        try:
            states[i] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            states[i] = "?"  # no such process, or no Linux
        with contextlib.suppress(OSError):
            with log.open("a") as out:
                out.write(f"the stacks of process {pid}, which does not answer or waits for one that does not:\n")
            sizes[log] = log.stat().st_size
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGCONT)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(log.stat().st_size == size for log, size in sizes.items()):
        time.sleep(0.05)
    time.sleep(0.2)  # the rest of what has begun
    return states


def get(ref: ray.ObjectRef, who: str, timeout_s: float | None) -> Any:
    try:
        return ray.get(ref, timeout=timeout_s)
    except GetTimeoutError:
        raise RuntimeError(
            f"{who} did not answer within {timeout_s:g} s: raise rollout.start_timeout_s, or see logs/ in the run "
            "directory"
        ) from None
    except RayError as e:
        raise RuntimeError(f"{who}: {said(e)}") from None


async def cause(error: RayError, answers: Sequence[asyncio.Future[Any]]) -> RayError:
    """The death of a worker rather than what the others say of the connection they lost: they may hear of it first."""
    if not (isinstance(error, RayTaskError) and isinstance(error.cause, RuntimeError)):
        return error
    done, _ = await asyncio.wait(answers, timeout=_DEATH_IS_KNOWN_S)
    return next((e for a in done if isinstance(e := a.exception(), RayActorError)), error)


def said(error: RayError) -> str:
    """The one sentence a user needs of a remote failure; the traceback is in the actor's log."""
    if isinstance(error, RayTaskError):
        known = isinstance(error.cause, ValueError | RuntimeError | OSError)
        return str(error.cause) if known else repr(error.cause)
    if isinstance(error, RayActorError):
        return "a worker process died (killed, or out of memory): see logs/ in the run directory, then run again"
    return str(error)
