"""Run a function in several processes that form one world of ranks, under a time limit.

Ranks are forked from a process that has imported torch and megatron and done nothing else (tests/support/warm.py):
spawned afresh, each would spend five seconds on the imports.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import pickle
import random
import signal
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

# where there is CUDA its runtime is up once megatron is imported, and does not live through a fork
_WARM: Literal["spawn", "forkserver"] = "spawn" if Path("/dev/nvidiactl").exists() else "forkserver"
multiprocessing.set_forkserver_preload(["tests.support.warm"])


def warm_context() -> ForkServerContext | SpawnContext:
    """Of processes that begin with torch and megatron imported."""
    return multiprocessing.get_context("spawn") if _WARM == "spawn" else multiprocessing.get_context("forkserver")


def free_port() -> int:
    """A free TCP port below those that the kernel hands out, so that no connection takes it before it is used."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _serve(line: Connection) -> None:
    """A rank's process: jobs in, results out, until the parent hangs up or a job fails."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    unseeded = torch.initial_seed()
    while True:
        try:
            fn, arguments = pickle.loads(line.recv_bytes())
        except EOFError:
            return
        try:
            value = fn(*arguments)
            # by value: torch's own connections would pass tensors as handles that die with this process
            answer = (pickle.dumps(value), None)
        except BaseException:  # a rank's edge: whatever it was, the parent reports it
            line.send_bytes(pickle.dumps((None, traceback.format_exc())))
            raise
        del value, arguments
        torch.manual_seed(unseeded)  # as a process that has just begun
        gc.collect()
        line.send_bytes(pickle.dumps(answer))


def _fork_ranks(begin: bytes, lines: list[Connection]) -> None:
    """A process that calls `begin` and forks a rank for each line; it ends after them."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before a module that `begin` imports reads it
    try:
        pickle.loads(begin)()
    except BaseException:  # as `_serve`
        for line in lines:
            line.send_bytes(pickle.dumps((None, traceback.format_exc())))
        raise
    gc.collect()
    gc.freeze()  # as in warm.py
    forked = []
    for line in lines:
        if pid := os.fork():
            forked.append(pid)
            continue
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: it ends with this process
        for other in lines:
            if other is not line:
                other.close()
        code = 1
        try:
            _serve(line)
            code = 0
        finally:
            os._exit(code)
    for line in lines:
        line.close()
    for pid in forked:
        os.waitpid(pid, 0)


class _Rank:
    """A process and the line to it. process: of several ranks, where they are forked from one."""

    def __init__(self, line: Connection, process: BaseProcess) -> None:
        self.line, self.process = line, process

    @staticmethod
    def start(context: ForkServerContext | SpawnContext) -> _Rank:
        line, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,))
        process.start()
        theirs.close()
        return _Rank(line, process)

    @staticmethod
    def fork(begin: Callable[[], object], count: int) -> list[_Rank]:
        context = multiprocessing.get_context("spawn")
        lines, theirs = zip(*(context.Pipe() for _ in range(count)), strict=True)
        process = context.Process(target=_fork_ranks, args=(pickle.dumps(begin), list(theirs)))
        process.start()
        for line in theirs:
            line.close()
        return [_Rank(line, process) for line in lines]

    def stop(self, patience: float) -> None:
        self.line.close()
        self.process.join(timeout=patience)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


_kept: list[_Rank] = []


@atexit.register
def _stop_kept() -> None:
    while _kept:
        _kept.pop().stop(0.0)


def _answers(ranks: list[_Rank], timeout_s: float) -> list[Any]:
    done: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    while len(done) < len(ranks):
        waiting = {r.line: i for i, r in enumerate(ranks) if i not in done}
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} not done in {timeout_s} s")
        for line in ready:
            i = waiting[line]  # type: ignore[index]
            try:
                value, error = pickle.loads(ranks[i].line.recv_bytes())
            except EOFError:
                ranks[i].process.join(timeout=5)
                raise AssertionError(f"rank {i} died with code {ranks[i].process.exitcode}") from None
            assert error is None, f"rank {i} failed:\n{error}"
            done[i] = pickle.loads(value)
    return [done[i] for i in range(len(ranks))]


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 240.0,
    keep: bool = False,
    cold: bool = False,
    begin: Callable[[], object] | None = None,
) -> list[Any]:
    """[fn(rank, world_size, port, *args)] in rank order; fn is a module-level function, results and args pickle.

    `port` is free on loopback when the ranks start. With `keep` the processes are those of the last call that asked so,
    with what those have imported since: for functions that leave their world and change nothing else in their process.
    With `cold` nothing is imported in them yet; with `begin` they are forked from a process that has called this
    function and imported nothing else before. Raises AssertionError with a rank's traceback when one fails, and
    TimeoutError after timeout_s; either way no process is left behind, but for kept ones until this process ends.
    """
    ranks = _kept[:world_size] if keep else []
    if keep:
        del _kept[:world_size]
    context = multiprocessing.get_context("spawn") if cold else warm_context()
    if begin is not None:
        ranks = _Rank.fork(begin, world_size)
    ranks += [_Rank.start(context) for _ in range(len(ranks), world_size)]
    port, patience = free_port(), 0.1
    try:
        for i, rank in enumerate(ranks):
            rank.line.send_bytes(pickle.dumps((fn, (i, world_size, port, *args))))
        out, patience = _answers(ranks, timeout_s), 5.0
        if keep:
            _kept[:0], ranks = ranks, []
    finally:
        for rank in ranks:
            rank.line.close()  # all of them first: a process of several ends after the last
        for rank in ranks:
            rank.stop(patience)
    return out
