"""What a driver with 64 servers, a rollout worker for each, and 128 ranks spends on watching them in a step of 100 s.

Stand-ins answer instantly, so that only the driver's own work counts: processor time of its process, less that of an
event loop which waits as long. Periods are shortened by the same factor as the step (--seconds), so that all beats of a
step are made. Measured together:

- `pulse`: the signs of life of 64 rollout workers (`cluster/workers/actors.Pulse`), each with a call that waits.
- `call`: the deadline of one call to 128 ranks that lasts the whole step (`nodes/waits.timed_out`).
- `epoch`: looks at the epoch of the run directory before writes and requests (`storage/fencing.Fence.check`), on this
  machine's temporary directory; CHECKS of them.

Not counted: what Ray itself does for a call.

Goals: all of it < 2 % of the step, and < 0.5 % for what is not a request: `call` and `epoch`.

    python benchmarks/watching.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from figures import add_write, finish
from rich.console import Console
from rich.table import Table

from miles_like.cluster.workers.actors import Pulse
from miles_like.nodes import waits
from miles_like.storage.fencing import Fence

SERVERS, RANKS, STEP_S, CHECKS = 64, 128, 100.0, 1000
BEAT_S, SILENT_S = 15.0, 600.0
GOALS = {"share_max": 0.02, "waits_share_max": 0.005}


async def answers(*_: object) -> int:
    return 0


async def pulses(seconds: float) -> None:
    """Each worker has a call under way; the workers' signs of life come at once."""
    factor = STEP_S / seconds
    worker = SimpleNamespace(pid=SimpleNamespace(remote=answers))
    watched = [Pulse(worker, SILENT_S, lambda: "", every_s=BEAT_S / factor) for _ in range(SERVERS)]
    await asyncio.gather(*(pulse.answer(asyncio.sleep(seconds)) for pulse in watched))
    for pulse in watched:
        assert pulse._watching is not None
        pulse._watching.cancel()


async def call(seconds: float) -> None:
    waits._SLICE_S = 5.0 * seconds / STEP_S
    ranks = [asyncio.ensure_future(asyncio.sleep(seconds)) for _ in range(RANKS)]
    assert not await waits.timed_out(ranks, 2 * seconds)


def processor_s(work: Callable[[], Awaitable[object]], seconds: float) -> float:
    """Of `work`, which waits for `seconds`, beyond those of an event loop that only waits."""

    async def idle() -> None:
        await asyncio.sleep(seconds)

    async def run() -> float:
        before = time.process_time()
        await idle()
        middle = time.process_time()
        await work()
        return (time.process_time() - middle) - (middle - before)

    return max(asyncio.run(run()), 0.0)


def epochs(where: Path) -> float:
    fence = Fence.begin(where)
    before = time.process_time()
    for _ in range(CHECKS):
        fence.check()
    return time.process_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_write(parser)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=STEP_S, help="of the shortened step")
    options = parser.parse_args()
    seconds = 5.0 if options.quick else options.seconds
    works: dict[str, Callable[[float], Any]] = {"pulse": pulses, "call": call}
    found = {name: processor_s(lambda work=work: work(seconds), seconds) for name, work in works.items()}  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as home:
        found["epoch"] = epochs(Path(home))
    figures = {f"{name}_s": value for name, value in found.items()}
    figures["share"] = sum(found.values()) / STEP_S
    figures["waits_share"] = (found["call"] + found["epoch"]) / STEP_S
    table = Table("figure", "value", title=f"a step of {STEP_S:g} s, {SERVERS} servers, {RANKS} ranks")
    for name, value in figures.items():
        table.add_row(name, f"{value:.5f}")
    Console().print(table)
    holds = figures["share"] <= GOALS["share_max"] and figures["waits_share"] <= GOALS["waits_share_max"]
    finish("watching", figures, GOALS, holds)


if __name__ == "__main__":
    main()
