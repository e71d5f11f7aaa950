"""What a step leaves on the device of a rank that sleeps."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest

from tests.support import toy
from tests.support.chosen import later
from tests.support.spawn import run_ranks


def _left(rank: int, world: int, port: int, hf: str, settings: dict[str, Any]) -> int:
    """Bytes that a step made and that are alive while the rank sleeps."""
    from megatron.core import parallel_state

    from megatron_bridge.fake.live_bytes import LiveBytes

    live = LiveBytes()
    with live, toy.trainer(toy.config(hf, **settings), rank, world, port) as t:
        rows, tokens = toy.grid(toy.samples(8, layers=t.family.moe_layers(t.hf)), dp=t.config.parallel.dp, micros=2)
        t.step(rows[t.dp_rank], tokens, 1)  # state of the optimizer
        with live.part("step"):
            t.step(rows[t.dp_rank], tokens, 2)
        gc.collect()
        t.sleep()
        gathered = parallel_state.get_global_memory_buffer().buffer.values()  # since the first step
        return live.device.get("step", 0) + sum(x.nbytes for x in gathered)


LAYOUTS = {"one rank": {}, "EP2": {"dp": 2, "ep": 2}, "PP2": {"pp": 2, "first_stage_layers": 2}, "TP2": {"tp": 2}}


@pytest.mark.parametrize("layout", later(LAYOUTS, ("PP2", "TP2"), beside="tests/megatron_bridge/step/test_asleep.py"))
def test_a_sleeping_rank_keeps_nothing_of_its_last_step(layout: str, tmp_path: Path) -> None:
    """Neither the micro-batches and their routes, nor what megatron keeps: the routing of a layer's last pass, from
    whose weights the inputs of recomputed layers can be reached, the hidden states that a stage received, and those
    that tensor-parallel ranks gathered."""
    hf, settings = toy.hf_dir(tmp_path / "hf"), LAYOUTS[layout]
    ranks = math.prod(settings.get(size, 1) for size in ("dp", "pp", "tp"))
    for left in run_ranks(_left, ranks, hf, {**settings, "recompute": "full"}):
        assert left < 256, "more than a few numbers"
