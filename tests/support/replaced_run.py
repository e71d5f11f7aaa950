"""Whole runs on plain processes with two servers, of which one goes wrong and is replaced by a spare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rollout.embedded.engine.engine import Engine
from tests.support import kill_points, local_run
from tests.support.broken_servers import ACTS, plant_once, plant_stale

VERSION = 2  # at which a server goes wrong
FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "stale": plant_stale,
    "waits": kill_points.wait,  # for the kill of a rank, before it starts
    **{name: partial(plant_once, name, VERSION) for name in ("killed", "stopped", "out of memory")},
}


def drive(
    run_dir: Path,
    home: Path,
    settings: Sequence[str],
    fault: str,
    numbers: Sequence[int],
    point: str,
    spares: int,
    in_spare: str = "none",
    loop: str | None = None,
    kill: kill_points.Kill | None = None,
) -> int:
    """numbers: of the servers that go wrong. point: "publication", or "generation": it gets a signal while it samples.
    in_spare: the fault of those that replace them. loop, kill: as in local_run.drive."""

    def in_server(number: int) -> None:
        if number in numbers:
            FAULTS[fault]() if point == "publication" else plant_in_generation(fault, VERSION)

    more: dict[str, Any] = {"in_server": in_server, "in_spare": FAULTS[in_spare], "spares": spares}
    return local_run.drive(run_dir, home, settings, kill, loop, **more)


def plant_in_generation(name: str, version: int) -> None:
    """The server gets a signal once it has sampled five tokens under weights of `version`."""
    step, began = Engine.step, dict[str, int]()

    def stepping(self: Engine) -> bool:
        worked = step(self)
        if self.version == str(version) and self.generated - began.setdefault(self.version, self.generated) >= 5:
            ACTS[name]()
        return worked

    Engine.step = stepping  # type: ignore[method-assign]


# a loop that stands after its third step until server 1 serves again
STANDS = """
import asyncio
from pathlib import Path

from miles_like.fleet.control import status
from miles_like.loop.controller import Controller


class Standing(Controller):
    async def after(self, record, *, last):
        await super().after(record, last=last)
        if record.step == 2:
            async with asyncio.timeout(60):
                while status(Path({run_dir!r}))["servers"][1]["state"] != "healthy":
                    await asyncio.sleep(0.05)
"""

# a loop whose user adds a server after its first step and removes another after the second
CHANGES = """
import asyncio
from pathlib import Path

from miles_like.fleet.control import Request, ask, status
from miles_like.loop.controller import Controller


class Changed(Controller):
    async def after(self, record, *, last):
        await super().after(record, last=last)
        run_dir = Path({run_dir!r})
        asked, state = {{0: (Request("add"), (2, "healthy")), 1: (Request("remove", 0), (0, "retired"))}}.get(
            record.step, (None, None)
        )
        if asked is None:
            return
        ask(run_dir, asked)
        async with asyncio.timeout(60):
            while state not in [(row["server"], row["state"]) for row in status(run_dir)["servers"]]:
                await asyncio.sleep(0.05)
"""
