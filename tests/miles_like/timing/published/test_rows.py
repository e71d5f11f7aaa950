"""Published runs are predicted, with one constant a device type that other runs give.

Not covered: what the authors changed between a recipe and the run of its row.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from miles_like.config.load import load_config
from miles_like.config.run import RunConfig
from miles_like.device_table import device
from miles_like.layout_search.search import SPARE, search
from miles_like.planning.compose import plan_run
from miles_like.planning.nearby import changed
from miles_like.planning.plan import Plan
from miles_like.run.setup.model_plan import planned_model
from miles_like.timing.of_run import Facts
from miles_like.timing.published import others
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
from miles_like.timing.published.others import MFU, prime_rl, verl, verl_mode
from miles_like.timing.rates.calibration import REACHED

ROOT = Path(__file__).parents[4]
LONG = pytest.mark.long(beside="tests/miles_like/timing/published/test_rows.py")
SHAPES = published_shapes(ROOT / "configs")
HELD = [*nemo_rl(SHAPES), *prime_rl(SHAPES), *verl(SHAPES)]
MORE = list(prime_rl(SHAPES, more=True))


def test_two_thirds_of_the_held_rows_are_within_a_quarter() -> None:
    good = [row for row in HELD if abs(row.error) <= 0.25]
    assert len(HELD) == 27 and len(good) >= 2 * len(HELD) / 3, [(r.name, f"{r.error:+.0%}") for r in HELD]


def test_two_thirds_of_all_rows_are_within_a_quarter() -> None:
    rows = [*HELD, *MORE]
    good = [row for row in rows if abs(row.error) <= 0.25]
    assert len(rows) == 48 and len(good) >= 2 * len(rows) / 3, [(r.name, f"{r.error:+.0%}") for r in rows]


def test_prime_rl_s_step_is_missed_without_what_its_code_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: no comparison is read back."""
    monkeypatch.setattr(others, "READ_BACK", 0.0)
    found = dict(zip((r.name for r in MORE), prime_rl(SHAPES, more=True), strict=True))
    for name in ("qwen3_0_6b, 1 H100, RL LoRA, 16384", "qwen3_4b, 1 H100, RL LoRA, 16384"):
        before = next(row for row in MORE if row.name == name)
        assert found[name].predicted > 1.1 * before.predicted


@pytest.mark.parametrize("row", [*HELD, *MORE], ids=lambda r: r.name)
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
    for row in [*HELD, *nemo_rl(SHAPES, DENSE), *MORE]:
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


@pytest.mark.parametrize("colocated", [True, False])
def test_verl_s_layout_fits_by_the_memory_plan(colocated: bool) -> None:
    """The published one of docs/advance/v1_async_trainer.md: TP2 PP2 CP2 EP4, servers of TP4, 4 nodes."""
    setup = verl_mode(SHAPES["qwen3_30b_a3b"], colocated=colocated, staleness=8.0)
    layout, engine = setup.train.parallel, setup.publish.engine
    assert (layout.tp, layout.pp, layout.cp, layout.ep, engine.tp) == (2, 2, 2, 4, 4) and setup.gpus == 32
    sizes = {f"parallel.{name}": getattr(layout, name) for name in ("tp", "pp", "cp", "ep", "dp", "vpp")}
    longest = round(setup.load.responses.longest)
    change = sizes | {
        "cluster.nodes": setup.gpus // 8,
        "cluster.colocate": colocated,
        "train.max_tokens_per_rank": setup.train.pack_tokens // layout.cp,
        "train.recompute": "full",
        "train.groups_per_step": setup.load.groups,
        "train.samples_per_group": setup.load.samples_per_group,
        "train.steps_per_rollout": setup.load.steps_per_rollout,
        "data.max_prompt_tokens": setup.train.pack_tokens - longest,
        "rollout.max_new_tokens": longest,
        "kernels.offload_optimizer": 0.0,
        "rollout.servers": engine.servers,
        "rollout.sglang": {"tp_size": engine.tp, "mem_fraction_static": 0.7},
    }
    run = changed(load_config(ROOT / "configs" / "qwen3_30b_a3b.toml"), change)
    assert run.parallel.world_size == setup.publish.ranks
    plan = plan_run(run, json.loads(Path(str(run.model.config)).read_text()), on=device("H100"))
    assert plan.fits, plan.verdict()


PRIME_RL = {  # one for the rows of each model, device and number of GPUs, with their longest sequences
    (model, name, gpus, "LoRA" in kind): max(n for m, d, g, k, n, _ in MFU if (m, d, g, k) == (model, name, gpus, kind))
    for model, name, gpus, kind, _, _ in MFU
}
ONES = {"qwen3_0_6b": "qwen3_0_6b", "qwen3_4b": "qwen3_4b", "glm45_air": "glm45_air"}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow, LONG] * (row[2] > 1), id=f"{row[0]}-{row[2]}") for row in PRIME_RL],
)
def test_the_search_finds_a_layout_for_rows_without_a_published_one(row: tuple[str, str, int, bool]) -> None:
    """prime-rl shards every matrix over all GPUs (FSDP2), which this trainer does not: a layout of this trainer, with
    servers that take turns with it, fits on as many GPUs of the kind, for sequences of the same length."""
    model, name, gpus, lora = row
    card, length = device(name), PRIME_RL[row]
    change: dict[str, object] = {
        "cluster.nodes": 1,
        "cluster.gpus_per_node": gpus,
        "cluster.device": name,
        "parallel": {"dp": gpus},
        "data.max_prompt_tokens": 1024,
        "rollout.max_new_tokens": length - 1024,
        "train.max_tokens_per_rank": length,
        "train.recompute": "full",
        "rollout.servers": 1,
        "rollout.sglang": {"tp_size": gpus, "mem_fraction_static": 0.6},
    }
    if lora:
        change |= {"lora": {"rank": 16, "alpha": 32}, "kernels": {"spec": "local"}}
    base = ROOT / "configs" / f"{ONES.get(model, 'qwen3_30b_a3b_node')}.toml"
    run = changed(load_config(base), change)
    hf = json.loads(Path(str(run.model.config)).read_text())

    def plan_of(other: RunConfig) -> Plan:
        return plan_run(other, planned_model(other, hf, Path()).hf, on=card)

    (found,) = search(run, hf, Facts(device=card), plan_of, kept=1).found
    assert found.config.cluster.nodes * found.config.cluster.gpus_per_node == gpus
    assert plan_of(found.config).fits and found.plan.spare >= SPARE
    assert found.config.max_pack_tokens >= length
