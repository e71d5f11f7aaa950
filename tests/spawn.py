"""Run a function in several processes that form one world of ranks, under a time limit."""

from __future__ import annotations

import os
import pickle
import queue
import random
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp


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


def _rank(fn: Callable[..., Any], rank: int, world_size: int, port: int, args: tuple[Any, ...], results: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    try:
        value = fn(rank, world_size, port, *args)
        # by value: a queue would pass tensors as handles that die with this process
        results.put((rank, pickle.dumps(value), None))
    except BaseException:  # a rank's edge: whatever it was, the parent reports it
        results.put((rank, None, traceback.format_exc()))
        raise


def run_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240.0) -> list[Any]:
    """[fn(rank, world_size, port, *args)] in rank order; fn is a module-level function, results and args pickle.

    `port` is free on loopback when the ranks start. Raises AssertionError with a rank's traceback when one fails, and
    TimeoutError after timeout_s; either way no process is left behind.
    """
    context = mp.get_context("spawn")
    results = context.Queue()
    port = free_port()
    ranks = [context.Process(target=_rank, args=(fn, r, world_size, port, args, results)) for r in range(world_size)]
    for process in ranks:
        process.start()
    done: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(done) < world_size:
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks {sorted(set(range(world_size)) - set(done))} not done in {timeout_s} s")
            try:
                rank, value, error = results.get(timeout=0.2)
            except queue.Empty:
                dead = [r for r, p in enumerate(ranks) if r not in done and p.exitcode not in (None, 0)]
                assert not (dead and results.empty()), f"rank {dead[0]} died with code {ranks[dead[0]].exitcode}"
                continue
            assert error is None, f"rank {rank} failed:\n{error}"
            done[rank] = pickle.loads(value)
    finally:
        for process in ranks:
            process.join(timeout=5 if len(done) == world_size else 0.1)
            if process.is_alive():
                process.kill()
                process.join()
    return [done[r] for r in range(world_size)]
