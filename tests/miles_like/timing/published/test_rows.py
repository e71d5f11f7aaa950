"""Published runs are predicted, with one constant a device type that other runs give.

Not covered: what the authors changed between a recipe and the run of its row.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_like.timing.published.models import Row, published_shapes
from miles_like.timing.published.nemo_rl import DENSE, RECIPES, calibration, nemo_rl, recipe_setup
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
def test_a_recipe_uses_its_devices(recipe: object) -> None:
    assert isinstance(recipe, type(RECIPES[0]))
    found = recipe_setup(SHAPES[recipe.model], recipe)
    ranks = recipe.gpus - (recipe.engine_gpus or 0)
    assert found.train.parallel.world_size == ranks and found.publish.ranks == ranks
    assert found.publish.engine.gpus == (recipe.engine_gpus or recipe.gpus)
    assert found.load.samples == recipe.samples[0] * recipe.samples[1]
    assert found.publish.engine.cache_tokens > 20_000
