"""What a step leaves on the device of a rank that sleeps."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.support import toy
from tests.support.spawn import run_ranks


def _left(rank: int, world: int, port: int, hf: str, settings: dict[str, Any]) -> int:
    """Bytes that a step made and that are alive while the rank sleeps."""
    from megatron_bridge.fake.live_bytes import LiveBytes

    live = LiveBytes()
    with live, toy.trainer(toy.config(hf, **settings), rank, world, port) as t:
        rows, tokens = toy.grid(toy.samples(8, layers=t.family.moe_layers(t.hf)), dp=t.config.parallel.dp, micros=2)
        t.step(rows[t.dp_rank], tokens, 1)  # state of the optimizer
        with live.part("step"):
            t.step(rows[t.dp_rank], tokens, 2)
        gc.collect()
        t.sleep()
        return live.device.get("step", 0)


@pytest.mark.parametrize(
    "settings", [{}, {"dp": 2, "ep": 2}, {"pp": 2, "first_stage_layers": 2}], ids=["one rank", "EP2", "PP2"]
)
def test_a_sleeping_rank_keeps_nothing_of_its_last_step(settings: dict[str, Any], tmp_path: Path) -> None:
    """Neither the micro-batches and their routes, nor what megatron's modules keep: the routing of a layer's last pass,
    from whose weights the inputs of recomputed layers can be reached, and the hidden states that a stage received."""
    hf, ranks = toy.hf_dir(tmp_path / "hf"), settings.get("dp", 1) * settings.get("pp", 1)
    for left in run_ranks(_left, ranks, hf, {**settings, "recompute": "full"}):
        assert left < 256, "more than a few numbers"
