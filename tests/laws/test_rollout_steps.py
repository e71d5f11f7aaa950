"""Law: several optimizer steps on one rollout are steps like any other, and see one old policy and its routes.

What must hold: the weights after them are those of as many single steps; every step receives the log-probabilities, and
under R2 the routes and gates, of the weights that the first began with; each (micro-batch, layer) is queried as often
as a pass queries it. Models have draft layers, whose routers take no part, and a dense first layer.

Not covered: bf16, more than two ranks, TransformerEngine's modules.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.types import LossInputs, LossOutput, MicroBatch
from tests.support import layouts, toy
from tests.support.refusals import check_refusal
from tests.support.spawn import free_port, run_ranks

Found = dict[str, Any]
Rollout = tuple[list[list[MicroBatch]], list[int]]
Routings = list[tuple[int, int, Tensor, Tensor]]  # (micro-batch, layer, ids, probs) of each
Updates = Callable[[str, str], tuple[dict[str, float], list[Tensor], Routings]]
Sharded = Callable[[str, str], list[dict[str, float]]]
LR = 3e-2  # large enough that one step moves choices of experts
SCHEDULE = {"lr": LR, "eps": 1e-4, "schedule": "linear", "decay_steps": 8}
R2 = {"mode": "r2"}
GATES = {"mode": "r2", "gates": True}
REPLAYS: dict[str, dict[str, Any]] = {"r2": R2, "gates": GATES, "r3": {}}
# name -> (what is recomputed, how often each router is asked in an update)
RECOMPUTED: dict[str, tuple[dict[str, Any], int]] = {
    "kept": ({}, 1),
    "full": ({"recompute": "full"}, 2),
    "selective, with routers": ({"recompute": "selective", "recompute_modules": ("moe",)}, 2),
    "selective, without": ({"recompute": "selective", "recompute_modules": ("core_attn",)}, 1),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tp": 2},
    "PP2xVPP2, recomputed": {"pp": 2, "vpp": 2, "recompute": "full"},
    "CP2": {"cp": 2},
    "EP2": {"dp": 2, "ep": 2},
}
LONG = pytest.mark.long(beside="tests/laws/test_rollout_steps.py")
QUICK = (
    *(("r2", "kept"), ("r2", "full"), ("gates", "full")),
    ("r2", "PP2xVPP2, recomputed"),
)


def _each(replays: Iterable[str], how: Iterable[str]) -> list[Any]:
    """Every replay in every way, long where it is not in QUICK."""
    return [pytest.param(*pair, marks=[LONG] * (pair not in QUICK)) for pair in itertools.product(replays, how)]


class Listening(toy.PolicyGradient):
    """Notes what a loss function is handed, and can spoil a call's loss and every second one's after it."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Tensor | None]] = []
        self.spoilt = -1

    def __call__(self, inputs: LossInputs) -> LossOutput:
        names = ("old_logprobs", "ref_logprobs")
        self.heard.append(
            {"logprobs": inputs.logprobs.detach().clone()} | {name: getattr(inputs, name) for name in names}
        )
        loss, stats = super().__call__(inputs)
        behind = len(self.heard) - 1 - self.spoilt
        return (loss * float("nan") if self.spoilt > 0 and behind >= 0 and behind % 2 == 0 else loss), stats


def _rollout(t: Any, seed: int, *, dp: int = 1, routes: bool = True) -> Rollout:
    """Two mini-batches of unequal size, of two micro-batches a data-parallel row each."""
    rows, tokens = [], []
    for part, n in ((0, 8), (1, 12)):
        samples = toy.samples(n, seed=2 * seed + part, layers=layouts.MOE_LAYERS, experts=layouts.EXPERTS)
        if not routes:
            samples = [replace(s, routing=None) for s in samples]
        grid, count = toy.grid(samples, dp=dp, micros=2)
        rows.append(grid[t.dp_rank])
        tokens.append(count)
    return rows, tokens


def _bits(t: Any) -> list[Tensor]:
    return [x.detach().clone() for x in (*t.models[0].parameters(), *t.models[0].buffers())]


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _config(hf: str, replay: Mapping[str, Any], **more: Any) -> Any:
    return toy.config(hf, replay=dict(replay), optimizer=SCHEDULE, mtp_coefficient=0.1, **more)


@contextmanager
def _trainer(hf: str, start: Path, replay: Mapping[str, Any], **more: Any) -> Iterator[tuple[Any, Listening]]:
    loss = Listening()
    with toy.trainer(_config(hf, replay, **more), 0, 1, free_port(), loss) as t:
        t.load_weights(start)
        yield t, loss


@contextmanager
def _watched(t: Any) -> Iterator[Routings]:
    """The routings from here on, in order."""
    from megatron_bridge.model.build import routers

    seen: Routings = []
    replay = t._step.replay
    stock, ids = replay.route, torch.empty(0)

    def route(layer: int, scores: Any, native: Any) -> Any:
        nonlocal ids
        picked, ids = stock(layer, scores, native)
        return picked, ids

    def note(layer: int) -> Any:
        return lambda _module, _args, out: seen.append(
            (replay.micro, layer, ids.clone(), out[0].detach().gather(1, ids).clone())
        )

    replay.route = route
    hooks = [r.register_forward_hook(note(i)) for r, i in zip(routers(t.chunks), replay.layers, strict=True)]
    yield seen
    del replay.route
    for hook in hooks:
        hook.remove()


def _single_steps(hf: str, start: Path, out: Found) -> None:
    with _trainer(hf, start, {}) as (t, loss):
        rows, tokens = _rollout(t, 0)
        t._step.run(rows[1], tokens[1], forward_only=True)
        out["second, before any step"] = [h["logprobs"] for h in loss.heard]
        out["singly"] = [dict(t.step(row, n, 1).metrics) for row, n in zip(rows, tokens, strict=True)]
        out["singly, heard"], out["singly, bits"] = loss.heard[2:], _bits(t)
        out["tokens"] = tokens


def _rollouts(hf: str, start: Path, where: Path, out: Found) -> None:
    """Two rollouts; the second also after a checkpoint, and after the first with a fault in its second step."""
    with _trainer(hf, start, {}) as (t, loss):
        report = t.train(*_rollout(t, 0), 1)
        out["together"], out["together, bits"], out["version"] = dict(report.metrics), _bits(t), report.version
        out["heard"] = list(loss.heard)
        t.save(where / "between")
        out["second"] = dict(t.train(*_rollout(t, 1), 2).metrics), _bits(t), t.steps_done
    with _trainer(hf, start, {}) as (t, _):
        t.load(where / "between")
        out["resumed"] = dict(t.train(*_rollout(t, 1), 2).metrics), _bits(t), t.steps_done
    for mode, replay in (("skip", {}), ("stop", R2)):
        with _trainer(hf, start, replay) as (t, _):
            rows, tokens = _rollout(t, 0)
            t.step(rows[0], tokens[0], 1)
            first = _bits(t)
        with _trainer(hf, start, replay, on_nonfinite=mode) as (t, loss):
            loss.spoilt = 3  # the second mini-batch's second micro-batch, also when the step is repeated
            try:
                out[mode] = dict(t.train(rows, tokens, 1).metrics)
            except RuntimeError as e:
                out[mode] = str(e)
            out[f"{mode}, after"] = _same(_bits(t), first), t.steps_done
    with _trainer(hf, start, {}) as (t, _):
        before = _bits(t)
        try:
            t.train([rows[0], [replace(b, routing=None) for b in rows[1]]], tokens, 1)
        except ValueError as e:
            out["no routes"] = str(e), _same(before, _bits(t))


def _reference(hf: str, start: Path, out: Found) -> None:
    with _trainer(hf, start, {}, reference=True) as (t, loss):
        rows, tokens = _rollout(t, 0)
        own = [x for row in rows for x in t.logprobs([replace(b, routing=None) for b in row])]
        t.train(rows, tokens, 1)
        out["reference"] = _same([h["ref_logprobs"] for h in loss.heard], own)
        out["reference replays"] = _same(
            [h["ref_logprobs"] for h in loss.heard], [h["old_logprobs"] for h in loss.heard]
        )


def _r2(hf: str, start: Path, out: Found) -> None:
    for name, replay in {"off": {"mode": "off"}, "r2": R2, "gates": GATES}.items():
        with _trainer(hf, start, replay) as (t, loss):
            rows, tokens = _rollout(t, 0)
            metrics = dict(t.step(rows[0], tokens[0], 1).metrics)
            out[f"{name}, one"] = metrics, [h["logprobs"] for h in loss.heard]
            out[f"{name}, one, gradients"] = {n: p.main_grad.clone() for n, p in t.models[0].named_parameters()}
    with _trainer(hf, start, GATES) as (t, _):
        rows, tokens = _rollout(t, 0)
        own = [r.trace for r in t._step.old_policy(rows[0]).routes]  # a single rank's are in the order of the tokens
    for name, record in {"r3 gates": own, "r3 no gates": [replace(trace, weights=None) for trace in own]}.items():
        with _trainer(hf, start, {"mode": "r3", "gates": True}) as (t, loss):
            row = [toy.with_trace(b, trace) for b, trace in zip(rows[0], record, strict=True)]
            try:
                out[f"{name}, one"] = dict(t.step(row, tokens[0], 1).metrics), [h["logprobs"] for h in loss.heard]
            except ValueError as e:
                out[name] = str(e)
    with _trainer(hf, start, GATES, router_aux_loss=0.05) as (t, _):
        rows, tokens = _rollout(t, 0)
        t.step(rows[0], tokens[0], 1)
        out["gates, balanced"] = {n: p.main_grad.clone() for n, p in t.models[0].named_parameters()}
    with _trainer(hf, start, R2) as (t, _):
        out["r2, no rollout routes"] = dict(t.train(*_rollout(t, 0, routes=False), 1).metrics), _bits(t)
        out["r2, evaluated"] = dict(t.evaluate(_rollout(t, 0)[0][0], _rollout(t, 0)[1][0]))


def _one_rank(rank: int, world: int, port: int, hf: str, where: Path) -> Found:
    out: Found = {}
    start = where / "start"
    with toy.trainer(_config(hf, {}), 0, 1, port) as t:
        toy.scramble(t)
        t.save(start)
    _single_steps(hf, start, out)
    _rollouts(hf, start, where, out)
    _reference(hf, start, out)
    _r2(hf, start, out)
    return out


def _update(rank: int, world: int, port: int, hf: str, start: Path, name: str, kind: str) -> Any:
    """Of two steps: metrics, weights, and every routing."""
    with _trainer(hf, start, REPLAYS[name], **RECOMPUTED[kind][0]) as (t, _), _watched(t) as seen:
        report = t.train(*_rollout(t, 0), 1)
        return dict(report.metrics), _bits(t), list(seen)


def _in_layout(rank: int, world: int, port: int, hf: str, start: Path, mode: str, name: str) -> dict[str, float]:
    layout = LAYOUTS[name]
    with toy.trainer(_config(hf, {"mode": mode}, **layout), rank, world, port) as t:
        t.load_weights(start)
        return dict(t.train(*_rollout(t, 0, dp=layout.get("dp", 1)), 1).metrics)


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def hf(where: Path) -> str:
    return toy.hf_dir(where / "hf", layouts.MODELS["mtp"] | {"num_nextn_predict_layers": 1})


@pytest.fixture(scope="module")
def found(where: Path, hf: str) -> Found:
    return run_ranks(_one_rank, 1, hf, where, keep=True, timeout_s=layouts.PATIENCE)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def updates(where: Path, hf: str, found: Found) -> Updates:
    """By replay and by what is recomputed, each run when it is first asked for."""
    return functools.cache(
        lambda name, kind: run_ranks(
            _update, 1, hf, where / "start", name, kind, keep=True, timeout_s=layouts.PATIENCE
        )[0]
    )


@pytest.fixture(scope="module")
def sharded(where: Path, hf: str, found: Found) -> Sharded:
    """The metrics of both ranks by replay and layout, each run when it is first asked for."""
    return functools.cache(
        lambda mode, name: run_ranks(
            _in_layout, 2, hf, where / "start", mode, name, keep=True, timeout_s=layouts.PATIENCE
        )
    )


def test_the_steps_of_a_rollout_are_single_steps(found: Found) -> None:
    """A loss that does not look at the old policy cannot tell: the same weights bit for bit, each step at its own
    learning rate. The pass that comes first leaves no trace."""
    assert _same(found["together, bits"], found["singly, bits"])
    assert found["version"] == 1, "one rollout, one publication"
    assert found["singly"][0]["train/lr"] > found["singly"][1]["train/lr"] == found["together"]["train/lr"]


def test_metrics_are_of_all_steps(found: Found) -> None:
    """Means over all tokens, so that a mini-batch weighs by its length; the largest of all; a gradient norm has no sum
    and is averaged."""
    got, (a, b), (n, m) = found["together"], found["singly"], found["tokens"]
    assert n != m
    for key in ("train/loss", "train/entropy"):
        assert got[key] == pytest.approx((a[key] * n + b[key] * m) / (n + m), rel=1e-12), key
    top = "mismatch/logprob_abs_diff_max"
    assert got[top] == max(a[top], b[top])
    assert got["train/grad_norm"] == pytest.approx((a["train/grad_norm"] + b["train/grad_norm"]) / 2, rel=1e-12)
    assert got["routing/replay_coverage"] == 1.0


def test_every_step_is_told_the_old_policys_log_probs(found: Found) -> None:
    """Those of the weights before the first step with the routes that the update replays: in the first step the very
    bits that it computes itself, in the second those of a forward pass before any step. A single step receives none."""
    olds, now = ([h[key] for h in found["heard"]] for key in ("old_logprobs", "logprobs"))
    assert _same(olds[:2], now[:2])
    assert _same(olds[2:], found["second, before any step"]) and not _same(olds[2:], now[2:])
    assert all(h["old_logprobs"] is None for h in found["singly, heard"])


def test_a_resumed_run_goes_on_with_the_schedule(found: Found) -> None:
    """A checkpoint between rollouts holds optimizer steps, not rollouts: metrics, weights and count bit for bit."""
    (metrics, bits, steps), (again, bits_again, steps_again) = found["second"], found["resumed"]
    assert metrics == again and _same(bits, bits_again) and steps == steps_again == 4
    assert metrics["train/lr"] == pytest.approx(LR * (1 - 3 / 8))


def test_a_step_that_is_not_finite_is_left_out_alone(found: Found) -> None:
    """The first step stays done, the schedule has moved by one; "stop" says which of the steps it was."""
    assert found["skip"]["train/skipped"] == 0.5 and math.isnan(found["skip"]["train/loss"])
    check_refusal(found["stop"], 1, 2, 2, 1)
    assert found["skip, after"] == found["stop, after"] == (True, 1)


def test_a_rollout_that_cannot_be_replayed_moves_nothing(found: Found) -> None:
    """The old-log-prob pass reads all mini-batches first, so a fault in the second is found before the first step."""
    message, unmoved = found["no routes"]
    assert unmoved
    check_refusal(message, 0)


def test_the_reference_routes_by_itself_in_every_step(found: Found) -> None:
    """Whatever is replayed: its log-probs are those without any record, of both mini-batches."""
    assert found["reference"] and not found["reference replays"]


@pytest.mark.parametrize("name", ["r2", "gates"])
def test_with_one_step_r2_is_the_identity(found: Found, name: str) -> None:
    """No weight has moved between recording and replay, so the forward pass is that of routing freely, bit for bit,
    recorded gates included; and so is every gradient, but where gates are constants."""
    (off, logprobs), (got, again) = found["off, one"], found[f"{name}, one"]
    assert off["train/loss"] == got["train/loss"] and _same(logprobs, again)
    assert got["routing/update_agreement"] == got["routing/replay_coverage"] == 1.0
    assert got["routing/agreement"] == off["routing/agreement"] < 0.1, "of the rollout's random routes"
    want, have = found["off, one, gradients"], found[f"{name}, one, gradients"]
    if name == "r2":
        assert _same(list(want.values()), list(have.values()))


def test_gates_that_come_with_the_rollouts_routes_are_replayed_under_r3(found: Found) -> None:
    """The trainer's own, sent as if by an engine: the identity. Routes without gates are refused."""
    (off, logprobs), (got, again) = found["off, one"], found["r3 gates, one"]
    assert off["train/loss"] == got["train/loss"] and _same(logprobs, again)
    check_refusal(found["r3 no gates"], 0, "replay.gates")


def test_replayed_gates_are_constants(found: Found) -> None:
    """No gradient to a router whose gates are replayed, bit for bit none, but an auxiliary loss's; draft layers'
    routers learn on."""
    for name, grad in found["gates, one, gradients"].items():
        if name.endswith("router.weight"):
            assert bool(grad.any()) == name.startswith("mtp."), name
            assert bool(found["r2, one, gradients"][name].any()), name
            assert bool(found["gates, balanced"][name].any()), name


def _passes(seen: Routings, asked: int) -> list[Routings]:
    """The two old-log-prob passes and the two updates, each over two micro-batches and all layers."""
    n = 2 * len(layouts.MOE_LAYERS)
    ends = [n, 2 * n, (2 + asked) * n, (2 + 2 * asked) * n]
    assert len(seen) == ends[-1]
    return [seen[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize(("mode", "kind"), _each(["r2", "r3"], RECOMPUTED))
def test_each_router_is_asked_once_a_pass_and_once_more_in_recomputation(
    updates: Updates, mode: str, kind: str
) -> None:
    """Counted at the routers, not at the tape: the old-log-prob pass never recomputes, the update only where the router
    is inside of what is recomputed. The draft layers' routers ask for nothing."""
    asked = RECOMPUTED[kind][1]
    _, _, seen = updates(mode, kind)
    keys = {(micro, layer) for micro in (0, 1) for layer in layouts.MOE_LAYERS}
    for times, one in zip((1, 1, asked, asked), _passes(seen, asked), strict=True):
        assert Counter((micro, layer) for micro, layer, _, _ in one) == dict.fromkeys(keys, times)


@pytest.mark.parametrize(("name", "kind"), _each(["r2", "gates"], ["kept", "full"]))
def test_the_second_step_takes_what_was_recorded_before_the_first(updates: Updates, name: str, kind: str) -> None:
    """Weights have moved, so that its routers would choose otherwise (the metric says so); ids are the recorded ones in
    forward and in recomputation, and with `gates` so are the probabilities, which else are fresh."""
    metrics, _, seen = updates(name, kind)
    assert metrics["routing/update_agreement"] < 1.0
    old = _passes(seen, RECOMPUTED[kind][1])
    for before, update in ((old[0], old[2]), (old[1], old[3])):
        recorded = {(micro, layer): (ids, probs) for micro, layer, ids, probs in before}
        for micro, layer, ids, probs in update:
            assert torch.equal(ids, recorded[micro, layer][0])
            moved = update is old[3] and name == "r2"
            assert torch.equal(probs, recorded[micro, layer][1]) != moved


@pytest.mark.parametrize("name", ["r2", pytest.param("gates", marks=LONG), pytest.param("r3", marks=LONG)])
def test_recomputation_changes_no_bit_of_several_steps(updates: Updates, name: str) -> None:
    assert _same(updates(name, "kept")[1], updates(name, "full")[1])


def test_under_r2_the_rollouts_routes_are_looked_at_only(found: Found, updates: Updates) -> None:
    """Without them the same weights come out, bit for bit; they say the agreement, and nothing is refused. An
    evaluation has no record and chooses by itself, as the pass that records does."""
    (metrics, bits, _), (without, same) = updates("r2", "kept"), found["r2, no rollout routes"]
    assert _same(bits, same)
    assert metrics["routing/agreement"] < 0.1 and "routing/agreement" not in without
    assert metrics["train/loss"] == without["train/loss"]
    assert found["r2, evaluated"]["routing/replay_coverage"] == 0.0


@pytest.mark.parametrize(("mode", "name"), _each(["r2", "r3"], LAYOUTS))
def test_two_steps_do_not_depend_on_the_layout(updates: Updates, sharded: Sharded, mode: str, name: str) -> None:
    """Each rank records and replays its own rows and layers. No choice is a near-tie with these seeds; sums in
    another order leave 1e-5 after an update."""
    want, ranks = updates(mode, "kept")[0], sharded(mode, name)
    assert ranks[0] == ranks[1]
    for key in ("train/loss", "train/grad_norm", "train/entropy", "routing/agreement", "routing/update_agreement"):
        assert ranks[0][key] == pytest.approx(want[key], rel=1e-4, abs=1e-6), key
