"""Law: what the routers count, tokens for their bias and load for their auxiliary loss, depends on no layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import layouts
from tests.support.chosen import chosen, later
from tests.support.layouts import Case, Run
from tests.support.spawn import run_ranks

BIAS = {"router_bias_update_rate": 0.01}
AUX = {"router_aux_loss": 0.05}
CASES: dict[str, Case] = {
    "bias, TP2": Case("mla", {"tp": 2}, BIAS),
    "bias, CP2": Case("mla", {"cp": 2}, BIAS),
    "bias, CP2, recomputed": Case("mla", {"cp": 2, "recompute": "full"}, BIAS),
    "bias, PP2xVPP2": Case("mla", {"pp": 2, "vpp": 2}, BIAS),
    "bias, EP2": Case("mla", {"dp": 2, "ep": 2}, BIAS),
    "auxiliary loss, TP2": Case("mla", {"tp": 2}, AUX),
    "auxiliary loss, CP2": Case("mla", {"cp": 2}, AUX),
    "auxiliary loss, CP2, GQA": Case("gqa", {"cp": 2}, AUX),
    "auxiliary loss, TP2, recomputed": Case("mla", {"tp": 2, "recompute": "full"}, AUX),
    "auxiliary loss, EP2": Case("mla", {"dp": 2, "ep": 2}, AUX),
}
FIRST = ("bias, CP2, recomputed", "auxiliary loss, TP2")
Found = tuple[dict[str, Run], dict[str, Run]]


def named(start: str) -> list[Any]:
    names = [name for name in CASES if name.startswith(start)]
    return later(names, first=FIRST, beside="tests/laws/test_router_statistics.py")


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """(the single rank's runs by key, the two ranks' by the run's name)."""
    where: Path = tmp_path_factory.mktemp("routers")
    cases = {name: CASES[name] for name in ("auxiliary loss, TP2", *chosen(request, "name", CASES))}
    alone: list[Any] = run_ranks(
        layouts.references, 1, where, {**cases, "none": Case("mla")}, timeout_s=layouts.PATIENCE, keep=True
    )
    return alone[0], run_ranks(layouts.in_layouts, 2, where, cases, timeout_s=layouts.PATIENCE, keep=True)[0]


@pytest.mark.parametrize("name", named("bias"))
def test_the_routing_bias_moves_alike(found: Found, name: str) -> None:
    """Megatron adds rate * sign(mean load - load) to each expert's bias; loads are whole numbers of tokens, so the
    biases are equal to the last bit wherever padding counts for nothing, and differ at once where it counts."""
    alone, runs = found
    assert runs[name].bias == alone[CASES[name].key].bias
    assert runs[name].bias != alone["mla"].bias, "the biases never moved"


@pytest.mark.parametrize("name", named("auxiliary"))
def test_the_auxiliary_gradient_is_that_of_one_rank(found: Found, name: str) -> None:
    """The loss is of a micro-batch's tokens, over all its tensor- and context-parallel ranks, and per token: the sum of
    the ranks' gradients must not depend on how many share it, nor on how much padding each has. Not covered: other
    packings, which give another loss by its definition."""
    alone, runs = found
    worst, distance = runs[name].worst
    assert distance < 2e-5, worst
    for want, got in zip(alone[CASES[name].key].metrics, runs[name].metrics, strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert got[key] == pytest.approx(want[key], rel=1e-5), key


def test_the_auxiliary_loss_reaches_the_weights(found: Found) -> None:
    """Guards the law above against a coefficient that does nothing."""
    alone, _ = found
    plain, balanced = (alone[key].metrics[0]["train/grad_norm"] for key in ("mla", CASES["auxiliary loss, TP2"].key))
    assert abs(plain - balanced) > 1e-4 * plain
