"""Work that runs on the nodes of a Ray cluster, one or several processes each, and is watched while it runs.

A process reports progress through an actor. One that reports none for `timeout_s` seconds is given up: its stacks are
written to its log, all processes are ended, and RuntimeError names its node and that log. The time that the work takes
as a whole has no bound, so that terabytes may be copied over a slow network.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from miles_like.ray_waits import on_node, said, write_stacks

Alive = Callable[[], None]  # called by the work whenever it has done a part; cheap
Report = tuple[int, str, int]  # pid, log, how often it reported
NodeWork = Callable[[Alive], Mapping[str, Any]]

DEFAULT_TIMEOUT_S = 1800.0
_START_S = 300.0  # for Ray to start a process
_SLICE_S = 5.0  # between two looks at the progress
_ENDED_S = 60.0  # for a process that was told to end


def node_ids() -> list[str]:
    """Ids of the cluster's living nodes; node number k of a placement is the k-th of them."""
    return sorted(n["NodeID"] for n in ray.nodes() if n["Alive"])


def on_every_node(work: NodeWork, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Mapping[str, Any]]:
    """Run `work` once on each node, all at once; their results in node order. The first failure is raised."""
    return _watched(partial(_call, work), [(node, ()) for node in node_ids()], ("staging", "run again"), timeout_s)


def over_nodes(
    work: Callable[[int], None], numbers: Sequence[int], *, each: int, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """`work(n)` for every number, in `each` processes on every node; a process takes neighbouring numbers, in order.

    The first failure stops the others and is raised as it was, once none of them writes any more.
    """
    nodes = [node for node in node_ids() for _ in range(each)]
    share = -(-len(numbers) // len(nodes))
    parts = [(node, tuple(numbers[i * share : (i + 1) * share])) for i, node in enumerate(nodes)]
    kept = "what is converted is kept: run again"
    _watched(partial(_do_all, work), [part for part in parts if part[1]], ("convert", kept), timeout_s)


def _call(work: NodeWork, _numbers: Sequence[int], alive: Alive) -> Mapping[str, Any]:
    return work(alive)


def _do_all(work: Callable[[int], None], numbers: Sequence[int], alive: Alive) -> None:
    for number in numbers:
        work(number)
        alive()


class _Progress:
    """Actor: what each process has reported."""

    def __init__(self) -> None:
        self._reports: dict[int, Report] = {}  # by process

    def report(self, number: int, pid: int, log: str) -> None:
        self._reports[number] = (pid, log, self._reports.get(number, (0, "", 0))[2] + 1)

    def reports(self) -> dict[int, Report]:
        return self._reports


def _work(job: Callable[..., Any], numbers: Sequence[int], number: int, progress: Any, least_s: float) -> Any:
    """In a process of a node. least_s: between two reports."""
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    log = os.path.realpath("/proc/self/fd/2")
    last = 0.0

    def alive() -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= least_s:
            last = now
            progress.report.remote(number, os.getpid(), log)

    ray.get(progress.report.remote(number, os.getpid(), log), timeout=_START_S)  # there before anything can hang
    return job(numbers, alive)


def _watched(
    job: Callable[..., Any], parts: Sequence[tuple[str, Sequence[int]]], words: tuple[str, str], timeout_s: float
) -> Any:
    """`job(numbers, alive)` for every part (node, numbers); the results in order. words: of errors, what the work is
    called and what to do after one."""
    progress = ray.remote(num_cpus=0)(_Progress).remote()
    task = ray.remote(num_cpus=0, max_retries=0)(_work)
    shared = ray.put(job)  # once, not with each task: it lists every piece of the checkpoint
    refs = [
        task.options(scheduling_strategy=on_node(node)).remote(shared, numbers, i, progress, min(1.0, timeout_s / 10))
        for i, (node, numbers) in enumerate(parts)
    ]
    left = list(refs)
    watch = _Watch(progress, [node for node, _ in parts], words, timeout_s)
    try:
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=watch.slice_s)
            ray.get(done)
            watch.check([refs.index(ref) for ref in left])
        return ray.get(refs)
    except RayTaskError as e:
        raise (e.cause if isinstance(e.cause, ValueError | OSError) else RuntimeError(said(e))) from None
    except RayError as e:
        raise RuntimeError(f"{words[0]}: {said(e)}; {words[1]}") from None
    finally:
        for ref in left:
            ray.cancel(ref, force=True)
        if left:
            ray.wait(left, num_returns=len(left), timeout=_ENDED_S)
        ray.kill(progress)


class _Watch:
    """Which processes have reported nothing for `timeout_s` seconds."""

    def __init__(self, progress: Any, nodes: Sequence[str], words: tuple[str, str], timeout_s: float) -> None:
        self._progress, self._nodes, self._timeout_s = progress, nodes, timeout_s
        self._name, self._again = words
        self.slice_s = min(_SLICE_S, timeout_s / 4)
        self._seen: dict[int, Report] = {}
        self._quiet = dict.fromkeys(range(len(nodes)), 0.0)
        self._looked = time.monotonic()

    def check(self, running: Sequence[int]) -> None:
        """Raises RuntimeError, once the stacks are written, for the first process that has been quiet too long."""
        passed = min(time.monotonic() - self._looked, 2 * self.slice_s)  # the driver may itself have been suspended
        self._looked += max(passed, time.monotonic() - self._looked)
        with contextlib.suppress(GetTimeoutError):  # no news
            reports: dict[int, Report] = ray.get(self._progress.reports.remote(), timeout=self.slice_s)
            for i, report in reports.items():
                if report != self._seen.get(i):
                    self._seen[i], self._quiet[i] = report, -passed
        for i in running:
            self._quiet[i] += passed
        late = [i for i in running if self._quiet[i] >= self._limit(i)]
        if late:
            raise RuntimeError(self._give_up(late[0]))

    def _limit(self, i: int) -> float:
        return self._timeout_s if i in self._seen else max(_START_S, self._timeout_s)

    def _give_up(self, i: int) -> str:
        address = next((n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == self._nodes[i]), "?")
        what = f"{self._name}: a process on node {address} made no progress for {self._limit(i):g} s"
        remedy = f"raise cluster.timeout_s if its disk is only slow; {self._again}"
        if i not in self._seen:
            return f"{what}, it did not start; {remedy}"
        pid, log, _ = self._seen[i]
        if not write_stacks([self._nodes[i]], [pid], [Path(log)]):
            return f"{what} and its node does not answer; {remedy}"
        return f"{what}: its stacks are at the end of {log} there; {remedy}"
