"""Programs a second in the bubblewrap sandbox: pooled, one sandbox for each program, and bare Python.

The three take turns on a program that prints one word. `pool_s`, `once_s`, `bare_s`: median seconds of a program, one
at a time; `pool_per_once`, `pool_per_bare`: ratios of the medians. `runs_per_s_N`: programs a second of N slots, which
compute for 20 ms each, for N = 1, 2, ... up to the cores; `bare_per_s_N`: the same work in N bare processes, which
shows what the machine gives; both the median of 5 rounds. `scaling`: of all slots over one, divided by the same of
bare processes.

Goals: a pooled program takes at most 0.5 of one with a new sandbox; scaling >= 0.7.

    python benchmarks/sandbox.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from figures import add_write, finish

from miles_like.sandbox.bwrap import PYTHON
from miles_like.sandbox.config import SandboxConfig
from miles_like.sandbox.make import make_pool, try_sandbox
from miles_like.sandbox.program import Program

GOALS = {"pool_per_once_max": 0.5, "scaling_min": 0.7}
HELLO = Program(code="print('hello')")
WORK_S = 0.02
LOOP = "import time\nend = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"
WORK = Program(code=LOOP.format(seconds=WORK_S))
BARE = [PYTHON, "-I", "-c", HELLO.code]


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def one_at_a_time(turns: int) -> dict[str, float]:
    config = SandboxConfig(kind="bwrap", slots=1)
    pool, once = make_pool(config), make_pool(config.model_copy(update={"runs_per_sandbox": 1}))
    calls: dict[str, Callable[[], object]] = {
        "pool_s": lambda: pool.run_now(HELLO),
        "once_s": lambda: once.run_now(HELLO),
        "bare_s": lambda: subprocess.run(BARE, stdout=subprocess.DEVNULL, check=True),
    }
    try:
        found: dict[str, list[float]] = {name: [] for name in calls}
        for call in calls.values():  # the first program of a pool waits for its sandbox
            call()
        for _ in range(turns):
            for name, call in calls.items():
                found[name].append(seconds(call))
    finally:
        pool.end()
        once.end()
    return {name: statistics.median(took) for name, took in found.items()}


def runs_per_s(slots: int, programs: int) -> float:
    pool = make_pool(SandboxConfig(kind="bwrap", slots=slots))

    async def all_of(n: int) -> None:
        await asyncio.gather(*(pool.run(WORK) for _ in range(n)))

    try:
        asyncio.run(all_of(2 * slots))
        return programs / seconds(lambda: asyncio.run(all_of(programs)))
    finally:
        pool.end()


def bare_per_s(slots: int, programs: int) -> float:
    """The work of so many programs, divided among processes."""
    words = [PYTHON, "-I", "-c", LOOP.format(seconds=WORK_S * programs / slots)]

    def all_of() -> None:
        for process in [subprocess.Popen(words) for _ in range(slots)]:
            process.wait()

    return programs / seconds(all_of)


def main() -> int:
    """0 when the goals hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true", help="30 turns instead of 200")
    args = parser.parse_args()
    try_sandbox(SandboxConfig(kind="bwrap"))
    turns, cores = 30 if args.quick else 200, len(os.sched_getaffinity(0))
    figures = one_at_a_time(turns)
    figures["pool_per_once"] = figures["pool_s"] / figures["once_s"]
    figures["pool_per_bare"] = figures["pool_s"] / figures["bare_s"]
    rates: dict[str, list[float]] = {}
    for _ in range(5):
        for slots in sorted({1, *(2**k for k in range(1, cores.bit_length())), cores}):
            rates.setdefault(f"runs_per_s_{slots}", []).append(runs_per_s(slots, turns * slots))
            rates.setdefault(f"bare_per_s_{slots}", []).append(bare_per_s(slots, turns * slots))
    figures |= {name: statistics.median(found) for name, found in rates.items()}
    of_slots = figures[f"runs_per_s_{cores}"] / figures["runs_per_s_1"]
    figures["scaling"] = of_slots / (figures[f"bare_per_s_{cores}"] / figures["bare_per_s_1"])
    rounded = {name: round(value, 5) for name, value in figures.items()}
    for name, value in rounded.items():
        print(f"{name:20}{value:10.4f}")
    holds = figures["pool_per_once"] <= GOALS["pool_per_once_max"] and figures["scaling"] >= GOALS["scaling_min"]
    finish("sandbox", rounded, GOALS, holds)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
