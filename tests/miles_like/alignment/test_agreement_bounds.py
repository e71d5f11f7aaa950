"""How the bounds on replayed routes are derived, and what they say of a step's figures.

Not covered: whether the figures are right (tests/routing_replay/test_agreement.py) and meet the bounds
(tests/laws/test_routes_in_mid_run.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.config import AgreementConfig, PrecisionConfig
from megatron_bridge.families.registry import family_of
from megatron_bridge.step.routing_check import RoutingBreach, check_routes, layer_bound
from miles_like.alignment.allowance import agreement_bounds
from miles_like.config.load import load_config
from tests.support.refusals import refuses

CONFIGS = Path(__file__).parents[3] / "configs"
TINY = CONFIGS / "tiny.toml"
BF16, FP8 = PrecisionConfig(format="bf16"), PrecisionConfig()


def derived(precision: PrecisionConfig = BF16, **how: Any) -> AgreementConfig:
    given = {"engine": "embedded", "exact": False, "more": False, "stale": False, "top_k": 4, "num_experts": 16} | how
    return agreement_bounds(given.pop("overall", None), given.pop("layer", None), precision, **given)


def test_a_bound_is_what_the_precision_explains() -> None:
    """All of it where both sides compute the same bits; less, the more the two sides differ."""
    qat = PrecisionConfig(qat=True)
    assert derived(exact=True).overall == 1.0
    assert derived() == derived(qat) and (derived().overall, derived().explained) == (pytest.approx(0.925), 0.9)
    one_side = (derived(FP8), derived(qat, engine="sglang"), derived(more=True))
    assert {b.overall for b in one_side} == {0.8125} and derived(stale=True) == derived(FP8, stale=True)
    assert derived(stale=True).overall == 0.625, "a quarter is chance, half of the rest is explained"


def test_bounds_that_are_given_are_taken() -> None:
    """One of the two leaves the other derived; 0 switches off."""
    assert derived(overall=0.5) == derived().model_copy(update={"overall": 0.5})
    off = derived(FP8, layer=0.0, overall=0.0)
    assert (off.overall, off.layer) == (0.0, 0.0)


def test_a_bound_that_chance_reaches_is_refused() -> None:
    with refuses(ValueError, "mismatch.layer_agreement_min", 0.2, 4, 16, "(0.25)"):
        derived(layer=0.2)
    with refuses(ValueError, "mismatch.expert_agreement_min", 9, 10, "0.90", 0.99):
        derived(top_k=9, num_experts=10)
    assert derived(top_k=9, num_experts=10, overall=0.95, layer=0).overall == 0.95


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_every_model_of_the_repository_has_room(path: Path) -> None:
    """Between what chance reaches and what its precision explains."""
    c = load_config(path)
    file = c.model.make.config if c.model.make is not None else c.model.config
    if file is None or c.replay.mode != "r3":
        return
    hf = json.loads(Path(file).read_text())
    family = family_of(hf)
    if not family.moe_layers(hf):
        return
    shape = {"top_k": family.top_k(hf), "num_experts": family.num_experts(hf)}
    for stale in (False, True):
        bounds = derived(c.precision, engine=c.rollout.engine, more=c.one_side_rounds, stale=stale, **shape)
        chance = shape["top_k"] / shape["num_experts"]
        assert chance + 0.1 <= bounds.overall < 1 and chance < layer_bound(bounds, chance) < bounds.overall


def test_a_layer_is_held_to_half_of_the_kappa_that_is_explained() -> None:
    """Above what neighbours share, whatever that is; at random sets halfway to what is explained."""
    bounds = derived()
    assert layer_bound(bounds, 0.25) == pytest.approx(0.25 + 0.75 * 0.9 / 2)
    assert all(
        s < layer_bound(derived(stale=stale), s) <= 0.95 for s in (0.0, 0.5, 0.8, 0.93) for stale in (False, True)
    )
    assert layer_bound(bounds, 1.0) == 0.95, "where all rows are alike nothing tells them apart"
    assert layer_bound(derived(layer=0.4), 0.9) == 0.4


def figures(overall: float, *layers: float, neighbours: float = 0.25) -> dict[str, float]:
    out = {"routing/expert_agreement": overall}
    for i, share in enumerate(layers, 3):
        out |= {f"routing/expert_agreement/{i}": share, f"routing/neighbour_agreement/{i}": neighbours}
    return out


def test_a_breach_names_the_layers_and_both_figures() -> None:
    bounds = derived()
    check_routes(figures(0.95, 0.98, 0.59, 0.99), bounds, range(3, 6), "step 7")
    with refuses(RoutingBreach, 7, 0.95, 0.925, 4, 0.56, 0.5875):
        check_routes(figures(0.95, 0.98, 0.56, 0.99), bounds, range(3, 6), "step 7")
    with refuses(RoutingBreach, 0.89, 5, 0.8):
        check_routes(figures(0.89, 0.98, 0.9, 0.8), bounds, range(3, 6), "step 7")
    with refuses(RoutingBreach, 3, 6, 2):
        check_routes(figures(0.3, *[0.3] * 6), bounds, range(3, 9), "step 7")
    with pytest.raises(RoutingBreach):
        check_routes(figures(0.95, 0.98, float("nan")), bounds, [3, 4], "step 7")


def test_a_layer_of_which_nothing_was_measured_is_a_breach() -> None:
    """A figure that is missing is no figure that is good."""
    bounds = derived()
    with refuses(RoutingBreach, 1, 3, 4):
        check_routes({"train/loss": 1.0}, bounds, [4, 3], "step 1")
    with refuses(RoutingBreach, 5, "mismatch.expert_agreement_min", "mismatch.layer_agreement_min"):
        check_routes(figures(0.99, 0.99, 0.99), bounds, [3, 4, 5], "step 1")
    with refuses(RoutingBreach, 1, 2, 3, 4, 3):
        check_routes({}, bounds, range(1, 8), "step 1")
    without = {k: v for k, v in figures(0.99, 0.99).items() if k != "routing/expert_agreement"}
    with refuses(RoutingBreach, "--resume", "mismatch.expert_agreement_min", "mismatch.layer_agreement_min"):
        check_routes(without, bounds, [3], "step 1")


def test_a_bound_of_0_and_a_dense_model_are_not_checked() -> None:
    check_routes(figures(0.1, 0.1), AgreementConfig(), [3], "step 1")
    check_routes({}, AgreementConfig(), [3], "step 1")
    check_routes({"train/loss": 1.0}, derived(), [], "step 1")


def test_one_row_that_differs_breaks_a_bit_exact_run() -> None:
    with refuses(RoutingBreach, 0.9999, 1, 4, 0.9998):
        check_routes(figures(0.9999, 1.0, 0.9998), derived(exact=True), [3, 4], "step 1")
    check_routes(figures(1.0, 1.0, 1.0, neighbours=0.9), derived(exact=True), [3, 4], "step 1")


def test_keys_that_do_nothing_are_refused() -> None:
    with refuses(ValueError, "mismatch.layer_agreement_min", 0.5, "replay.mode", "off"):
        load_config(TINY, ["replay.mode=off", "mismatch.layer_agreement_min=0.5"])
    with refuses(ValueError, "mismatch.expert_agreement_min"):
        load_config(TINY, ["mismatch.expert_agreement_min=1.5"])
    c = load_config(TINY).mismatch
    assert (c.check_every, c.checksums_every, c.expert_agreement_min, c.layer_agreement_min) == (50, 10, None, None)
