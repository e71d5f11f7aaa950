"""Executed FLOPs against those of small ranks, which torch counts while they are executed on fake tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.device_table import device
from miles_like.timing.of_run import Facts, layer_setup
from miles_like.timing.shape import model_shape
from tests.support.executed_flops import executed_flops
from tests.support.executed_ranks import CASES, MODELS, PACK, fake_ranks
from tests.support.layouts import PATIENCE
from tests.support.spawn import run_ranks


@pytest.mark.long(beside="tests/miles_like/timing/test_step_flops.py")
def test_flops_of_draft_layers_and_of_modules_that_are_computed_again(tmp_path: Path) -> None:
    """Small models: one with a layer of multi-token prediction, and one with context-parallel ranks."""
    names = ["ETP2, MTP", "CP2, recomputed in parts"]
    ranks = run_ranks(fake_ranks, 2, str(tmp_path), names, "cpu", timeout_s=PATIENCE)
    for name, counts in [pair for found in ranks for pair in found.items()]:
        case = CASES[name]
        run, shape = case.run(tmp_path), model_shape(MODELS[case.model])
        setup = layer_setup(run.config, MODELS[case.model], Facts(device=device("H100"), imbalance=run.imbalance))
        found = executed_flops(
            shape, setup, counts.stage, tokens=PACK.tokens, pairs=PACK.causal_pairs, loss_rows=PACK.tokens
        )
        assert found == pytest.approx(counts.flops, rel=1e-6), name
