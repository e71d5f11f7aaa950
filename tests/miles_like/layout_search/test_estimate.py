"""The cheap floor is below the memory plan, wherever that plan can be made.

Not covered: how far below; a loose floor costs time, not layouts.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.device_table import device
from miles_like.layout_search.estimate import LIBRARIES, Floor
from miles_like.layout_search.space import OFFLOAD, RECOMPUTE, Divisions, Layout, Refusals
from miles_like.planning.compose import plan_run
from miles_like.planning.memory.parts import total
from miles_like.planning.nearby import changed
from miles_like.timing.of_run import Facts, step_setup
from miles_like.timing.shape import model_shape
from miles_like.timing.train import Memo

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "deepseek_v3_fp8", "qwen3_4b"])
def test_no_layout_holds_less_than_the_floor(name: str) -> None:
    run = load_config(ROOT / "configs" / f"{name}.toml")
    assert run.model.config is not None
    hf = json.loads(Path(run.model.config).read_text())
    shape, card = model_shape(hf), device("H100")
    base = step_setup(run, hf, Facts(device=card))
    floor = Floor(
        shape=shape,
        device=card,
        tokens=run.train.max_tokens_per_rank,
        rounded=2.0 * run.precision.qat,
        rows=base.load.tokens / run.train.steps_per_rollout,
    )
    divisions = list(Divisions(hf, shape, 8, Refusals()).of(run.parallel.world_size))
    chosen = random.Random(0).sample(list(itertools.product(divisions, RECOMPUTE, OFFLOAD)), 10)
    for parallel, recompute, offload in chosen:
        layout = Layout(parallel, recompute, offload)
        alltoall = {"kernels.dispatcher": "alltoall"} if parallel.ep * parallel.etp == 1 else {}
        plan = plan_run(changed(run, {**layout.change(), **alltoall}), hf, on=card)
        most = max(total(row.phases["training"]) for row in plan.stages)
        train = replace(base.train, layer=replace(base.train.layer, parallel=parallel))
        least = floor.nbytes(layout, train, Memo()) + LIBRARIES
        assert least <= most * 1.001, (layout.described(), least / 2**30, most / 2**30)
        assert floor.fits(layout, train, Memo()) == (least <= card.memory)
