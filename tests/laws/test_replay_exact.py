"""Law: with replay.mode = r3 the trainer takes the recorded experts, all of them, once, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import toy
from tests.support.spawn import free_port, run_ranks

Found = dict[str, Any]


def _gradients(t: Any) -> dict[str, torch.Tensor]:
    return {name: p.main_grad.clone() for name, p in t.models[0].named_parameters()}


def _run(t: Any, row: list[Any], tokens: int) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Metrics and gradients of a step that is not applied, so that every case starts from the same weights."""
    return t._step.run(row, tokens), _gradients(t)


def _fails(t: Any, row: list[Any], tokens: int) -> str:
    try:
        t._step.run(row, tokens)
    except ValueError as e:
        return str(e)
    return "no error"


def _stock_replay(t: Any, row: list[Any], tokens: int, ids: torch.Tensor) -> tuple[dict[str, float], Any]:
    """The same through megatron's own RouterReplay, which handles one micro-batch at a time."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    from megatron_bridge.model.build import routers

    t._step.replay.mode = "off"  # nothing asks our tape any more
    for i, router in enumerate(routers(t.chunks)):
        router.router_replay = RouterReplay()
        router.router_replay.set_target_indices(ids[:, i])
        router.router_replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    return _run(t, row, tokens)


def _misuse(t: Any, row: list[Any], tokens: int) -> Found:
    from megatron_bridge.model.build import routers

    replay, out = t._step.replay, {}
    out["no routes"] = _fails(t, [toy.with_routes(b, None) for b in row], tokens)
    stock = replay.route

    def twice(*args: Any) -> Any:
        stock(*args)
        return stock(*args)

    replay.route = twice
    out["asked twice"] = _fails(t, row, tokens)
    del replay.route
    replay.recompute = True
    out["not recomputed"] = _fails(t, row, tokens)
    replay.recompute = False
    first = routers(t.chunks)[0]
    hook, first.router_replay = first.router_replay, None
    out["not asked"] = _fails(t, row, tokens)
    first.router_replay = hook
    return out


def _one_rank(rank: int, world: int, port: int, hf: str, start: Path) -> Found:
    rows, tokens = toy.grid(toy.samples(12), dp=1, micros=3)
    row, out = rows[0], {}
    with toy.trainer(toy.config(hf, mode="off"), rank, world, port) as t:
        toy.scramble(t)
        t.save(start)
        own = toy.own_routes(t, row, tokens)
        mine = [toy.with_routes(b, ids) for b, ids in zip(row, own, strict=True)]
        out["off"] = _run(t, mine, tokens)
        out["off, random record"] = _run(t, row, tokens)
    shifted = [toy.with_routes(b, (ids + 1) % toy.EXPERTS) for b, ids in zip(row, own, strict=True)]
    with toy.trainer(toy.config(hf), rank, world, free_port()) as t:
        t.load_weights(start)
        out["own"], out["shifted"] = _run(t, mine, tokens), _run(t, shifted, tokens)
        out["evaluated"] = t.evaluate(mine, tokens)
        out |= _misuse(t, mine, tokens)
        out["own again"] = _run(t, mine, tokens)
    with toy.trainer(toy.config(hf, recompute="full"), rank, world, free_port()) as t:
        t.load_weights(start)
        out["shifted, recomputed"] = _run(t, shifted, tokens)
        one, n = toy.grid(toy.samples(4), dp=1, micros=1)
    with toy.trainer(toy.config(hf), rank, world, free_port()) as t:
        t.load_weights(start)
        out["one"] = _run(t, one[0], n)
        out["one, megatron's replay"] = _stock_replay(t, one[0], n, one[0][0].routing.experts.to(torch.int64))
    return out


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    where = tmp_path_factory.mktemp("replay")
    return run_ranks(_one_rank, 1, toy.hf_dir(where / "hf"), where / "start", keep=True)[0]


def _same_gradients(a: Found, b: Found) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_replaying_the_own_choice_changes_no_bit(found: Found) -> None:
    """The same ids select the same scores, so loss and every gradient are those of routing natively, bit for bit."""
    (off, off_grad), (own, own_grad) = found["off"], found["own"]
    assert off["train/loss"] == own["train/loss"] and _same_gradients(off_grad, own_grad)
    assert own["routing/agreement"] == 1.0 and own["routing/replay_coverage"] == 1.0
    assert off["routing/agreement"] == 1.0 and off["routing/replay_coverage"] == 0.0
    assert found["evaluated"]["train/loss"] == own["train/loss"]
    assert _same_gradients(found["own again"][1], own_grad), "a failed step left something behind"


def test_other_routes_change_the_loss_and_reach_the_router(found: Found) -> None:
    """Guards the law above against a replay that is ignored. The gates are fresh scores of the recorded experts, so the
    router still learns from experts it would not have chosen."""
    shifted, gradients = found["shifted"]
    assert abs(shifted["train/loss"] - found["own"][0]["train/loss"]) > 1e-3
    assert shifted["routing/agreement"] < 0.05
    for layer in toy.LAYERS:
        assert float(gradients[f"decoder.layers.{layer}.mlp.router.weight"].norm()) > 1e-6


def test_agreement_is_measured_without_replay(found: Found) -> None:
    """Random 4 of 16 experts almost never are the router's set; the loss is not touched by the record."""
    metrics, gradients = found["off, random record"]
    assert metrics["routing/agreement"] < 0.05 and metrics["routing/replay_coverage"] == 0.0
    assert _same_gradients(gradients, found["off"][1])


def test_recomputed_activations_are_routed_alike(found: Found) -> None:
    """Full recomputation asks each router again in backward; with other routes than in forward the gradients would
    differ. Three micro-batches, so a route of the wrong one would show. Not covered: selective recomputation."""
    assert _same_gradients(found["shifted"][1], found["shifted, recomputed"][1])


def test_megatrons_own_replay_agrees(found: Found) -> None:
    """Oracle: megatron's RouterReplay given the same ids, on one micro-batch, which is what it can do."""
    (ours, our_grad), (stock, stock_grad) = found["one"], found["one, megatron's replay"]
    assert ours["train/loss"] == stock["train/loss"] and _same_gradients(our_grad, stock_grad)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        pytest.param("no routes", "no expert choices", id="no routes-carries no expert choices"),
        ("asked twice", "used twice"),
        ("not asked", "were not used in the forward pass"),
        ("not recomputed", "were not used in the recomputation"),
    ],
)
def test_a_row_unused_or_used_twice_fails_the_step(found: Found, case: str, message: str) -> None:
    """Each recorded row is used exactly once in forward (and once more in recomputation); anything else would train on
    other experts than the rollout's without a trace."""
    assert message in found[case]
