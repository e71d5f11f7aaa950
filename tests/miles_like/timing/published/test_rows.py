"""Published runs are predicted, with one constant a device type that other runs give.

Not covered: what the authors changed between a recipe and the run of its row.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.device_table import device
from miles_like.planning.compose import plan_run
from miles_like.planning.nearby import changed
from miles_like.timing.published.models import Row, published_shapes
from miles_like.timing.published.nemo_rl import (
    DENSE,
    PROMPT,
    RECIPES,
    Recipe,
    calibration,
    nemo_rl,
    recipe_setup,
)
from miles_like.timing.published.others import prime_rl, verl
from miles_like.timing.rates.calibration import REACHED

ROOT = Path(__file__).parents[4]
SHAPES = published_shapes(ROOT / "configs")
HELD = [*nemo_rl(SHAPES), *prime_rl(SHAPES), *verl(SHAPES)]


def test_two_thirds_of_the_held_rows_are_within_a_quarter() -> None:
    good = [row for row in HELD if abs(row.error) <= 0.25]
    assert len(HELD) == 27 and len(good) >= 2 * len(HELD) / 3, [(r.name, f"{r.error:+.0%}") for r in HELD]


@pytest.mark.parametrize("row", HELD, ids=lambda r: r.name)
def test_no_row_is_missed_by_a_factor(row: Row) -> None:
    assert abs(row.error) < 0.6 and row.decides


def test_the_calibration_is_that_of_runs_that_are_not_held() -> None:
    found = calibration(SHAPES)
    assert found.keys() == {"H100", "GB200"}
    for name, value in found.items():
        assert REACHED[name] == pytest.approx(value, abs=0.01)
    assert not {(r.model, r.device, r.gpus, r.k) for r in DENSE} & {(r.model, r.device, r.gpus, r.k) for r in RECIPES}


def test_another_calibration_moves_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted error of a factor of 2 leaves few rows."""
    monkeypatch.setitem(REACHED, "H100", REACHED["H100"] / 2)  # type: ignore[misc]
    monkeypatch.setitem(REACHED, "GB200", REACHED["GB200"] / 2)  # type: ignore[misc]
    good = [row for row in nemo_rl(SHAPES) if abs(row.error) <= 0.25]
    assert len(good) < len(RECIPES) / 3


@pytest.mark.parametrize("recipe", [*RECIPES, *DENSE], ids=lambda r: f"{r.model}-{r.gpus}-{r.device}-{r.k}")
def test_a_recipe_uses_its_devices(recipe: Recipe) -> None:
    found = recipe_setup(SHAPES[recipe.model], recipe)
    ranks = recipe.gpus - (recipe.engine_gpus or 0)
    assert found.train.parallel.world_size == ranks and found.publish.ranks == ranks
    assert found.publish.engine.gpus == (recipe.engine_gpus or recipe.gpus)
    assert found.load.samples == recipe.samples[0] * recipe.samples[1]
    assert found.publish.engine.cache_tokens > 20_000


def test_the_page_has_the_present_predictions() -> None:
    """docs/plan.md is written by a script; a change of a formula has to write it again."""
    page = (ROOT / "docs" / "plan.md").read_text()
    for row in [*HELD, *nemo_rl(SHAPES, DENSE), *prime_rl(SHAPES, more=True)]:
        (line,) = [x for x in page.splitlines() if f"| {row.source} | {row.name} |" in x]
        assert f"| {row.predicted:,.4g} {row.unit} | {row.error:+.0%}" in line


BASES = {
    "deepseek_v3": "deepseek_v3_fp8",
    "qwen3_235b_a22b": "qwen3_235b_a22b",
    "qwen3_30b_a3b": "qwen3_30b_a3b",
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.model}-{r.gpus}-{r.device}-{r.k}")
def test_a_published_layout_fits_by_the_memory_plan(recipe: Recipe) -> None:
    """With this project's trainer and a stock SGLang of the same size in vLLM's place."""
    card, (tp, cp, ep, pp) = device(recipe.device), recipe.layout
    ranks, servers = recipe.gpus - (recipe.engine_gpus or 0), (recipe.engine_gpus or recipe.gpus)
    first, last = recipe.ends or (None, None)
    sizes: dict[str, object] = {"tp": tp, "cp": cp, "ep": ep, "pp": pp, "dp": ranks // (tp * cp * pp), "vpp": 1}
    sizes |= {"first_stage_layers": first, "last_stage_layers": last}
    change = {f"parallel.{name}": size for name, size in sizes.items()}
    prompts = round(PROMPT)
    change |= {
        "cluster.nodes": recipe.gpus // card.node_gpus,
        "cluster.gpus_per_node": card.node_gpus,
        "cluster.device": card.name,
        "cluster.colocate": recipe.engine_gpus is None,
        "train.max_tokens_per_rank": recipe.limit // cp,
        "train.recompute": "full" if recipe.recompute else "none",
        "train.groups_per_step": recipe.samples[0],
        "train.samples_per_group": recipe.samples[1],
        "train.steps_per_rollout": recipe.updates,
        "data.max_prompt_tokens": prompts,
        "rollout.max_new_tokens": recipe.limit - prompts,
        "kernels.offload_optimizer": 0.0,
        "kernels.dispatcher": "alltoall",
        "rollout.servers": servers // recipe.engine_tp,
        "rollout.sglang": {"tp_size": recipe.engine_tp, "mem_fraction_static": max(recipe.memory, 0.6)},
        "precision": {"format": "fp8" if recipe.fp8 else "bf16"},
    }
    run = changed(load_config(ROOT / "configs" / f"{BASES[recipe.model]}.toml"), change)
    hf = json.loads(Path(str(run.model.config)).read_text())
    plan = plan_run(run, hf, on=card)
    assert plan.fits, plan.verdict()
