"""Law: a step's loss and gradient do not depend on how the model, the batch or the tokens are spread."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_bridge import toy
from tests.spawn import free_port, run_ranks

STEPS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"dp": 2, "ep": 2},
    "EP2 without distributed optimizer": {"dp": 2, "ep": 2, "distributed_optimizer": False},
    "TP2 + sequence parallel": {"tp": 2},
    "TP2, experts too": {"tp": 2, "etp": 2},
    "PP2": {"pp": 2, "first_stage_layers": 1},
    "DP2": {"dp": 2},
    "CP2": {"cp": 2},
    "CP2, full recomputation": {"cp": 2, "recompute": "full"},
    "EP2, full recomputation": {"dp": 2, "ep": 2, "recompute": "full"},
    "PP2, full recomputation": {"pp": 2, "first_stage_layers": 1, "recompute": "full"},
}
COMPARED = ("train/loss", "train/grad_norm", "train/entropy", "mismatch/logprob_abs_diff_max", "routing/agreement")
Metrics = list[dict[str, float]]


def _train(t: Any, *, dp: int, micros: int) -> Metrics:
    out = []
    for step in range(STEPS):
        rows, tokens = toy.grid(toy.samples(16, seed=step), dp=dp, micros=micros)
        out.append(dict(t.step(rows[t.dp_rank], tokens, step + 1).metrics))
    return out


def _one_rank(rank: int, world: int, port: int, hf: str, start: Path) -> dict[str, Metrics]:
    """Saves the common start, then trains from it over 1, 2, 4 and 16 micro-batches (16: unpacked)."""
    out: dict[str, Metrics] = {}
    for micros in (4, 1, 2, 16):
        with toy.trainer(toy.config(hf), rank, world, port if micros == 4 else free_port()) as t:
            if micros == 4:
                toy.scramble(t)
                t.save(start)
            t.load_weights(start)
            out[f"{micros} micro-batches"] = _train(t, dp=1, micros=micros)
    with toy.trainer(toy.config(hf), rank, world, free_port()) as t:
        t.load_weights(start)
        rows, tokens = toy.grid(toy.samples(16, seed=0), dp=1, micros=4)
        idle = replace(toy.sample(5, 9), loss_mask=torch.zeros(9, dtype=torch.bool))
        out["idle"] = [dict(t.step([idle, *rows[0], idle], tokens, 1).metrics)]
    return out


def _two_ranks(rank: int, world: int, port: int, hf: str, start: Path, ports: dict[str, int]) -> dict[str, Metrics]:
    out: dict[str, Metrics] = {}
    for name, layout in LAYOUTS.items():
        with toy.trainer(toy.config(hf, **layout), rank, world, ports[name]) as t:
            t.load_weights(start)
            out[name] = _train(t, dp=layout.get("dp", 1), micros=4 // layout.get("dp", 1))
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metrics]:
    where = tmp_path_factory.mktemp("invariance")
    hf, start = toy.hf_dir(where / "hf"), where / "start"
    out: dict[str, Metrics] = run_ranks(_one_rank, 1, hf, start)[0]
    both = run_ranks(_two_ranks, 2, hf, start, {name: free_port() for name in LAYOUTS})
    for name in LAYOUTS:
        assert both[0][name] == both[1][name], f"{name}: ranks report different metrics"
    return out | both[0]


@pytest.mark.parametrize("name", [*LAYOUTS, "1 micro-batches", "2 micro-batches", "16 micro-batches"])
def test_loss_and_gradient_are_those_of_one_rank(runs: dict[str, Metrics], name: str) -> None:
    """Layouts and packings compute the same sums in another order, so only fp32 rounding may differ: 1e-5 relative in
    two steps from one checkpoint, the second on weights that the first has changed. Expert choices are replayed, since
    a near-tie could otherwise flip. Not covered: bf16, more than two ranks."""
    for want, got in zip(runs["4 micro-batches"], runs[name], strict=True):
        for key in COMPARED:
            assert got[key] == pytest.approx(want[key], rel=1e-5), f"{name}: {key}"
        assert got["routing/replay_coverage"] == 1.0


def test_a_micro_batch_without_loss_counts_for_nothing(runs: dict[str, Metrics]) -> None:
    """Rows of unequal length are filled up with such; they must not even enter a denominator."""
    for key in COMPARED:
        assert runs["idle"][0][key] == pytest.approx(runs["4 micro-batches"][0][key], rel=1e-6), key


def test_the_steps_compared_are_different_steps(runs: dict[str, Metrics]) -> None:
    """Guards the law above against comparing a constant: batches differ and weights move."""
    losses = [m["train/loss"] for m in runs["4 micro-batches"]]
    norms = [m["train/grad_norm"] for m in runs["4 micro-batches"]]
    assert len({round(x, 3) for x in losses}) == STEPS and len({round(x, 3) for x in norms}) == STEPS
