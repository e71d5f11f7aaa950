"""Run work on the nodes of a Ray cluster, in one or several processes per node, with a watchdog.

A process reports progress through an actor. If it reports none for `timeout_s` seconds, its stacks are written to its
log, all processes are ended, and RuntimeError names its node and that log. The total time has no limit, so that
terabytes can be copied over a slow network.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from miles_like.nodes.members import Node, cluster_gist
from miles_like.nodes.waits import error_message, on_node, write_stacks

Alive = Callable[[], None]  # reports progress; the work calls it after each part; cheap
Report = tuple[int, str, int]  # (pid, log, number of reports)
R = TypeVar("R")
NodeWork = Callable[[Alive], R]
Job = Callable[[Sequence[int], Alive], R]

DEFAULT_TIMEOUT_S = 1800.0
_START_S = 300.0  # time limit for Ray to start a process
_SLICE_S = 5.0  # between two checks of the progress
_ENDED_S = 60.0  # time limit for a cancelled process to end


def on_every_node(work: NodeWork[R], nodes: Sequence[Node], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[R]:
    """Run `work` once on each node, concurrently; return the results in node order. Raises the first failure."""
    return _watched(partial(_call, work), [(node, ()) for node in nodes], ("staging", "run again"), timeout_s)


def on_nodes(works: Sequence[NodeWork[R]], nodes: Sequence[Node], *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[R]:
    """Run `works[k]` on node k, concurrently; return the results in that order. Raises the first failure."""
    parts = [(node, (i,)) for i, node in enumerate(nodes[: len(works)])]
    return _watched(partial(_call_own, works), parts, ("staging", "run again"), timeout_s)


def over_nodes(
    work: Callable[[int], None],
    numbers: Sequence[int],
    *,
    nodes: Sequence[Node],
    each: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> None:
    """Call `work(n)` for every number, in `each` processes on every node; a process takes consecutive numbers.

    The first failure cancels the other processes and is raised unchanged once all have ended.
    """
    workers = [node for node in nodes for _ in range(each)]
    share = -(-len(numbers) // len(workers))
    parts = [(node, tuple(numbers[i * share : (i + 1) * share])) for i, node in enumerate(workers)]
    kept = "run again, converted parts are kept"
    _watched(partial(_do_all, work), [part for part in parts if part[1]], ("convert", kept), timeout_s)


def _call(work: NodeWork[R], _numbers: Sequence[int], alive: Alive) -> R:
    return work(alive)


def _call_own(works: Sequence[NodeWork[R]], numbers: Sequence[int], alive: Alive) -> R:
    return works[numbers[0]](alive)


def _do_all(work: Callable[[int], None], numbers: Sequence[int], alive: Alive) -> None:
    for number in numbers:
        work(number)
        alive()


class _Progress:
    """Actor that collects the reports of all processes."""

    def __init__(self) -> None:
        self._reports: dict[int, Report] = {}  # by process number

    def report(self, number: int, pid: int, log: str) -> None:
        self._reports[number] = (pid, log, self._reports.get(number, (0, "", 0))[2] + 1)

    def reports(self) -> dict[int, Report]:
        return self._reports


def _work(job: Job[R], numbers: Sequence[int], number: int, progress: Any, least_s: float) -> R:
    """The Ray task: runs `job` in a process of a node. least_s: minimum time between two reports."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    log = os.path.realpath("/proc/self/fd/2")
    last = 0.0

    def alive() -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= least_s:
            last = now
            progress.report.remote(number, os.getpid(), log)

    ray.get(progress.report.remote(number, os.getpid(), log), timeout=_START_S)  # before anything can hang
    return job(numbers, alive)


def _watched(
    job: Job[R], parts: Sequence[tuple[Node, Sequence[int]]], words: tuple[str, str], timeout_s: float
) -> list[R]:
    """Run `job(numbers, alive)` for every part (node, numbers); return the results in order.

    words: for error messages, (name of the work, what to do after a failure)."""
    here = on_node(ray.get_runtime_context().get_node_id())  # not on a node that may end while others go on
    actor: Any = ray.remote(num_cpus=0)(_Progress)
    progress: Any = actor.options(scheduling_strategy=here).remote()
    task: Any = ray.remote(num_cpus=0, max_retries=0)(_work)
    shared = ray.put(job)  # once and not with each task: it lists every piece of the checkpoint
    refs = [
        task.options(scheduling_strategy=on_node(node.id)).remote(
            shared, numbers, i, progress, min(1.0, timeout_s / 10)
        )
        for i, (node, numbers) in enumerate(parts)
    ]
    left = list(refs)
    watch = _Watch(progress, [node for node, _ in parts], words, timeout_s)
    try:
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=watch.slice_s)
            ray.get(done)
            watch.check([refs.index(ref) for ref in left])
        results: list[R] = ray.get(refs)
        return results
    except RayTaskError as e:
        raise (e.cause if isinstance(e.cause, ValueError | OSError) else RuntimeError(error_message(e))) from None
    except RayError as e:
        raise RuntimeError(f"{words[0]}: {error_message(e)}; {words[1]}") from None
    finally:
        for ref in left:
            ray.cancel(ref, force=True)
        if left:
            ray.wait(left, num_returns=len(left), timeout=_ENDED_S)
        ray.kill(progress)


class _Watch:
    """Detects processes that have reported nothing for `timeout_s` seconds."""

    def __init__(self, progress: Any, nodes: Sequence[Node], words: tuple[str, str], timeout_s: float) -> None:
        self._progress, self._nodes, self._timeout_s = progress, nodes, timeout_s
        self._name, self._again = words
        self.slice_s = min(_SLICE_S, timeout_s / 4)
        self._seen: dict[int, Report] = {}
        self._quiet = dict.fromkeys(range(len(nodes)), 0.0)
        self._looked = time.monotonic()

    def check(self, running: Sequence[int]) -> None:
        """Raises RuntimeError, after its stacks are written, for the first process past its limit."""
        passed = min(time.monotonic() - self._looked, 2 * self.slice_s)  # bounded: the driver may have been suspended
        self._looked += max(passed, time.monotonic() - self._looked)
        with contextlib.suppress(GetTimeoutError):  # no new reports
            reports: dict[int, Report] = ray.get(self._progress.reports.remote(), timeout=self.slice_s)
            for i, report in reports.items():
                if report != self._seen.get(i):
                    self._seen[i], self._quiet[i] = report, -passed
        for i in running:
            self._quiet[i] += passed
        late = [i for i in running if self._quiet[i] >= self._limit(i)]
        if late:
            raise RuntimeError(self._timeout_message(late[0]))

    def _limit(self, i: int) -> float:
        return self._timeout_s if i in self._seen else max(_START_S, self._timeout_s)

    def _timeout_message(self, i: int) -> str:
        what = f"{self._name}: a process on node {self._nodes[i].address} made no progress for {self._limit(i):g} s"
        remedy = f"raise cluster.timeout_s if the disk is only slow; {self._again}"
        if i not in self._seen:
            return f"{what}: it did not start; {cluster_gist()}; {remedy}"
        pid, log, _ = self._seen[i]
        if not write_stacks([self._nodes[i].id], [pid], [Path(log)]):
            return f"{what} and its node does not answer; {remedy}"
        return f"{what}: its stacks are at the end of {log} there; {remedy}"
