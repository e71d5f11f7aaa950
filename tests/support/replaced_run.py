"""Whole runs on plain processes with two servers, of which one goes wrong and is replaced by a spare."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from rollout.embedded.engine.engine import Engine
from tests.support import local_run
from tests.support.broken_servers import plant_once, plant_stale

VERSION = 2  # at which a server goes wrong
FAULTS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "stale": plant_stale,
    **{name: partial(plant_once, name, VERSION) for name in ("killed", "stopped", "out of memory")},
}


def drive(
    run_dir: Path, home: Path, settings: Sequence[str], fault: str, numbers: Sequence[int], point: str, spares: int
) -> int:
    """numbers: of the servers that go wrong. point: "publication", or "generation": it is killed while it samples."""

    def in_server(number: int) -> None:
        if number in numbers:
            FAULTS[fault]() if point == "publication" else plant_death_in_generation(VERSION)

    return local_run.drive(run_dir, home, settings, None, in_server=in_server, spares=spares)


def plant_death_in_generation(version: int) -> None:
    """The server ends once it has sampled five tokens under weights of `version`."""
    step, began = Engine.step, dict[str, int]()

    def stepping(self: Engine) -> bool:
        worked = step(self)
        if self.version == str(version) and self.generated - began.setdefault(self.version, self.generated) >= 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return worked

    Engine.step = stepping  # type: ignore[method-assign]
