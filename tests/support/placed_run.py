"""As scripts/run_deepseek.py, in a run that joins a Ray cluster. Writes to the file that PLACED names, for each rank
and server, a line of JSON: its role, its index, and the number of the node that it is on by Ray's records."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

import ray
from ray._private import state

from miles_like.cluster.actors import ActorClass
from miles_like.cluster.placement import Slot
from miles_like.cluster.run_nodes import RunNodes

START_S = 120.0
_start = RunNodes.start


def _noted(self: RunNodes, actor_class: ActorClass, slot: Slot, log: Path) -> Any:
    actor = _start(self, actor_class, slot, log)
    pid = ray.get(actor.pid.remote(), timeout=START_S)
    on = state.actors(actor._actor_id.hex())["Address"]["NodeID"]
    node = [n.id for n in self.nodes].index(on)
    with Path(os.environ["PLACED"]).open("a") as out:
        out.write(json.dumps({"role": slot.role, "index": slot.index, "node": node, "pid": pid}) + "\n")
    return actor


if __name__ == "__main__":
    RunNodes.start = _noted  # type: ignore[method-assign]
    runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "run_deepseek.py"), run_name="__main__")
