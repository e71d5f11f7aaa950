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
    with live, toy.trainer(toy.config(hf, mode="off", **settings), rank, world, port) as t:
        rows, tokens = toy.grid(toy.samples(8), dp=world, micros=2)
        t.step(rows[t.dp_rank], tokens, 1)  # state of the optimizer
        with live.part("step"):
            t.step(rows[t.dp_rank], tokens, 2)
        gc.collect()
        t.sleep()
        return live.device.get("step", 0)


@pytest.mark.parametrize("settings", [{}, {"dp": 2, "ep": 2}], ids=["one rank", "EP2"])
def test_a_sleeping_rank_keeps_no_hidden_states(settings: dict[str, Any], tmp_path: Path) -> None:
    """Layers are recomputed from their inputs, which the routing weights of a layer's last pass refer to."""
    hf, ranks = toy.hf_dir(tmp_path / "hf"), settings.get("dp", 1)
    tokens = min(sum(len(b.tokens) for b in row) for row in toy.grid(toy.samples(8), dp=ranks, micros=2)[0]) // 2
    for left in run_ranks(_left, ranks, hf, {**settings, "recompute": "full"}):
        assert left < tokens * 128 * 4, "more than one layer's input"
