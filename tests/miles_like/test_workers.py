"""Ray's part of a step: each rank is handed its row of the grid, and of the row's routes only what it needs.

Ranks here are stand-ins that tell what came to them. Not covered: the trainer behind them (tests/e2e).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.packing import pack
from miles_like.placement import Slot
from miles_like.types import TrainBatch
from miles_like.workers import RayTrainer, start_ray, stop_ray
from routing_replay.align import pack_rows
from routing_replay.parts import RankRoutes, fed_routes
from routing_replay.trace import RoutingTrace
from tests.miles_like.made_samples import LAYERS, TOP_K, group, sample
from tests.miles_like.standin_rank import PLACES, Stand


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str, TrainBatch], Any]]:
    """(layout, batch) -> the step's metrics, and the row that came to each rank."""
    start_ray(None)
    logs = tmp_path_factory.mktemp("logs")

    def step(where: str, batch: TrainBatch) -> Any:
        async def run() -> Any:
            slots = [Slot(role="trainer", index=i, node=0, gpus=()) for i in range(2)]
            trainer = RayTrainer(Stand(where), slots, len(batch.grid), Path(logs))
            report = await trainer.train([batch, batch])
            rows = await trainer._all("finish_save", [(True,)] * 2)
            await trainer.close()
            return report.metrics, rows

        return asyncio.run(run())

    yield step
    stop_ray()


def batch(*, dp: int, routing: bool = True) -> TrainBatch:
    """Six samples of odd lengths in micro-batches of two or so, no two tokens alike."""
    samples = [
        sample("p", i, prompt_len=2 + i % 3, response_len=3, first_token=20 * i, routing=routing) for i in range(6)
    ]
    return pack([group(samples)], [[1.0] * 6], dp_size=dp, max_tokens=14)


@pytest.mark.parametrize("where", PLACES)
def test_a_rank_is_sent_its_rows_and_layers_alone(ray: Any, where: str) -> None:
    """Bytes counted where they arrive: the tokens that a rank feeds, times the layers it has, times K, one byte each,
    and four bytes a row of checksum, which each pipeline stage has of its own. They are
    the rollout's for those tokens; ranks that need the same are counted once. Two optimizer steps."""
    sent = batch(dp=2 if where == "DP2" else 1)
    metrics, came = ray(where, sent)
    counted: dict[Any, int] = {}
    for (dp, part), (row, again) in zip(PLACES[where], came, strict=True):
        assert [m.samples for m in again] == [m.samples for m in row]
        counted[dp, part] = 0
        for whole, m in zip(sent.grid[dp], row, strict=True):
            rows = pack_rows(whole.cu_seqlens, part).rows
            rows = rows[rows >= 0]
            assert isinstance(m.routing, RankRoutes) and isinstance(whole.routing, RoutingTrace)
            assert m.routing.trace.experts.untyped_storage().nbytes() == len(rows) * len(part.layers) * TOP_K
            assert m.samples == whole.samples == m.routing.samples
            for name in ("tokens", "labels", "loss_mask", "advantages", "rollout_logprobs", "cu_seqlens"):
                assert torch.equal(getattr(m, name), getattr(whole, name))
            fed = fed_routes(m.routing, m.samples, m.tokens, m.cu_seqlens, part)
            real = pack_rows(whole.cu_seqlens, part).rows >= 0
            columns = [LAYERS.index(layer) for layer in part.layers]
            assert torch.equal(fed.experts[real], whole.routing.experts[rows][:, columns])
            counted[dp, part] += m.routing.nbytes
    tokens = sum(len(m.tokens) for row in sent.grid for m in row)
    assert metrics["routing/bytes"] / 2 == sum(counted.values())
    assert sum(counted.values()) == tokens * (len(LAYERS) * TOP_K + 4 * (len(LAYERS) if where == "PP2" else 1))
    if where in ("CP2", "PP2"):
        assert max(counted.values()) < 0.7 * sum(counted.values())


def test_without_routes_none_are_counted(ray: Any) -> None:
    metrics, came = ray("TP2", batch(dp=1, routing=False))
    assert "routing/bytes" not in metrics and all(m.routing is None for rows in came for row in rows for m in row)
