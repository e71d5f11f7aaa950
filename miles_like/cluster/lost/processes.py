"""Actors whose processes have ended, seen without a call to them; and the end of processes that remain."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import state
from ray.core.generated import gcs_pb2
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError

from miles_like.nodes.members import living_nodes
from miles_like.nodes.waits import on_node

LOST = (RayActorError, ActorUnschedulableError)  # errors of calls to actors that do not answer any more
LOOK_S = 0.5  # between two looks at the states of actors
_DEAD = gcs_pb2.ActorTableData.ActorState.DEAD  # type: ignore[attr-defined]  # generated code without types
_ENDED_S = 20.0  # time limit for processes to end, once they have been killed
_PROCESS = "a worker process died (killed, or out of memory)"
_NODE = "its node is lost"
_NODE_WORDS = ("node has died", "node was terminated", "node_died_error_context", "NodeAffinitySchedulingStrategy")


def actor_id(handle: Any) -> str:
    """The id of an actor in Ray's table."""
    return str(handle._actor_id.hex())


def dead_actors(ids: Collection[str]) -> Mapping[str, str]:
    """Those of the actors that Ray knows to be dead: id -> why. One request to the head node, whatever the number of
    actors."""
    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    table: Mapping[str, Mapping[str, Any]] = state.actor_table(None, job, "DEAD")
    return {actor: why_died(str(table[actor]["DeathCause"])) for actor in ids if actor in table}


def why_died(cause: Exception | str) -> str:
    """A clause: what happened to an actor by the words of Ray 2.60's error or of its table."""
    text = str(cause)
    return _NODE if any(words in text for words in _NODE_WORDS) else _PROCESS


async def first_deaths(actors: Sequence[Any]) -> Mapping[int, str]:
    """Waits until an actor is dead; number of an actor -> why, of all that are. Each must have been called before.

    Ray's head node reports each death of an actor to the processes that have called it, so that a look at what this
    process knows costs microseconds and no request. A head node that does not answer why is asked again."""
    numbers = {actor_id(actor): i for i, actor in enumerate(actors)}
    while True:
        with contextlib.suppress(RayError, ConnectionError, TimeoutError):
            ended = any(actor._get_local_state() == _DEAD for actor in actors)
            if ended and (found := await asyncio.to_thread(dead_actors, numbers)):
                return {numbers[actor]: why for actor, why in found.items()}
        await asyncio.sleep(LOOK_S)


def end_processes(nodes: Sequence[str], pids: Sequence[int]) -> list[int]:
    """Kill actors' processes, also those stopped by a signal, and wait until they have ended: their devices' memory is
    free then, and they write nothing more.

    nodes, pids: one per process. Returns the numbers of those on living nodes that could not be ended within 20 s;
    processes of a lost node are not waited for.
    """
    here, alive = ray.get_runtime_context().get_node_id(), {node.id for node in living_nodes()}
    of_node: dict[str, list[int]] = {}
    for i, node in enumerate(nodes[: len(pids)]):
        of_node.setdefault(node, []).append(i)
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_end)
    asked = {
        node: task.options(scheduling_strategy=on_node(node)).remote([pids[i] for i in own])
        for node, own in of_node.items()
        if node in alive and node != here
    }
    left = set(_end([pids[i] for i in of_node.get(here, ())]))
    remaining = [i for i in of_node.get(here, ()) if pids[i] in left]
    for node, ref in asked.items():
        try:
            left = set(ray.get(ref, timeout=_ENDED_S + 10))
        except RayError:
            left = set(pids)
        remaining += [i for i in of_node[node] if pids[i] in left and node in {n.id for n in living_nodes()}]
    return sorted(remaining)


def _end(pids: Sequence[int]) -> list[int]:
    """Runs on the processes' node. Returns those that have not ended."""
    left, deadline = [pid for pid in pids if _is_actor(pid)], time.monotonic() + _ENDED_S
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while (left := [pid for pid in left if _is_actor(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def _is_actor(pid: int) -> bool:
    """Whether the process runs and is a worker of Ray: the number may be another process's since."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return stat not in "ZX" and (not words or b"ray::" in words)  # none: it is about to end
    except OSError:
        return False
