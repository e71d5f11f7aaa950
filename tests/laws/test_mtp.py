"""Law: the multi-token prediction loss is megatron's own, whatever the layout and the packing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import toy
from tests.support.chosen import chosen, later
from tests.support.layouts import EXPERTS, ROUTED
from tests.support.spawn import free_port, run_ranks

DEPTHS, COEFFICIENT = 2, 0.3
PACKINGS = ("1 micro-batch", "13 micro-batches")
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2 + sequence parallel": {"tp": 2},
    "PP2": {"pp": 2, "first_stage_layers": 1},
    "EP2": {"dp": 2, "ep": 2},
    "CP2": {"cp": 2},
    "PP2, full recomputation": {"pp": 2, "first_stage_layers": 1, "recompute": "full"},
    "CP2, selective recomputation": {"cp": 2, "recompute": "selective"},
}

FIRST = ("PP2", PACKINGS[1])
NAMES = later([*LAYOUTS, *PACKINGS], first=FIRST, beside="tests/laws/test_mtp.py")


def _parts() -> list[Any]:
    """Samples whose routes are replayed; MTP layers choose by themselves. One is too short for depth 2."""
    parts = toy.samples(12, experts=EXPERTS)
    return [*parts, replace(toy.sample(77, 2, experts=EXPERTS), loss_mask=torch.ones(2, dtype=torch.bool))]


def _step(t: Any, *, dp: int = 1, micros: int = 4) -> dict[str, Any]:
    """Metrics and per-parameter gradients of a step that is not applied; gradients are those of every shard."""
    rows, tokens = toy.grid(_parts(), dp=dp, micros=micros)
    t.optimizer.zero_grad()
    metrics = t._step.run(rows[t.dp_rank], tokens)
    t.optimizer.prepare_grads()
    norm = float(t.optimizer.get_grad_norm())
    return {"loss": metrics["train/loss"], "mtp": metrics.get("train/mtp_loss"), "norm": norm}


def _gradients(t: Any) -> dict[str, Tensor]:
    return {n: p.main_grad.clone() for n, p in t.models[0].named_parameters()}


def _stock(t: Any) -> dict[str, float]:
    """One sample at a time through megatron's own MTP block and head: its roll, whole logits, torch's cross-entropy.

    The stock roll zeroes a sample's last input token of each depth, whose row has no label at that depth."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer, roll_tensor

    from megatron_bridge.step.shard import shard

    model, count = t.models[0], 0
    ours = {layer: type(layer) for layer in model.mtp.layers}
    losses = []
    for part in _parts():
        s = shard(part, t.parallel, torch.device("cpu"), shard_spec=t.shard_spec, num_experts=EXPERTS)
        t._step.replay.load([s], forward_only=True)
        t._step.replay.forward_of(0)
        seen: list[Tensor] = []
        hook = model.decoder.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out))
        model(s.tokens, s.positions, None, labels=_padded(s.labels), loss_mask=_padded(s.loss_mask),
              packed_seq_params=s.packed)  # fmt: skip
        hook.remove()
        for layer in ours:
            layer.__class__ = MultiTokenPredictionLayer
        out = model.mtp(
            input_ids=s.tokens, position_ids=s.positions, hidden_states=seen[0], attention_mask=None,
            packed_seq_params=s.packed, embedding=model.embedding,
        )  # fmt: skip
        for layer, kind in ours.items():
            layer.__class__ = kind
        labels, mask = s.labels, s.loss_mask
        for state in out.chunk(1 + DEPTHS)[1:]:
            labels, mask = roll_tensor(labels, packed_seq_params=s.packed)[0], roll_tensor(mask)[0]
            logits = state[:, 0] @ model.output_layer.weight.t()
            nll = torch.nn.functional.cross_entropy(logits, labels[0], reduction="none") * mask[0]
            losses.append(nll.sum())
            count += int(mask.sum())
    whole = torch.stack(losses).sum()
    named = dict(model.named_parameters())
    grads = torch.autograd.grad(whole, list(named.values()), allow_unused=True)
    return {"mtp": float(whole) / count, "sum": float(whole), "grads": dict(zip(named, grads, strict=True))}


def _padded(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(DEPTHS, x.shape[1])])


def _one_rank(rank: int, world: int, port: int, hf: str, start: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    with toy.trainer(toy.config(hf, mtp_coefficient=COEFFICIENT), rank, world, port) as t:
        toy.scramble(t)
        t.save(start)
        out["4 micro-batches"] = _step(t)
        trained = _gradients(t)
        out["names"] = sorted(n for n in trained if n.startswith("mtp."))
        out["1 micro-batch"], out["13 micro-batches"] = _step(t, micros=1), _step(t, micros=13)
        stock = _stock(t)
        out["stock"] = stock["mtp"]
    with toy.trainer(toy.config(hf, mtp_coefficient=1e-12), rank, world, free_port()) as t:
        t.load_weights(start)
        _step(t)
        tiny = _gradients(t)
    with toy.trainer(toy.config(hf), rank, world, free_port()) as t:
        t.load_weights(start)
        out["off"] = _step(t)
        off = _gradients(t)
    out["tiny"] = max(float((tiny[n] - off[n]).norm() / off[n].norm()) for n in off)
    tokens = toy.grid(_parts(), dp=1, micros=1)[1]
    out["gap"] = {}
    for name, got in trained.items():
        more = stock["grads"][name]
        want = off.get(name, 0.0) + (0.0 if more is None else COEFFICIENT / DEPTHS / tokens * more)
        out["gap"][name] = float((got - want).norm() / want.norm())
    out["shared"] = {n: stock["grads"][n] is not None for n in trained}
    return out


def _two_ranks(rank: int, world: int, port: int, hf: str, start: Path, ports: dict[str, int], save: Path) -> Any:
    out = {}
    for name, layout in ((name, LAYOUTS[name]) for name in ports):
        with toy.trainer(toy.config(hf, mtp_coefficient=COEFFICIENT, **layout), rank, world, ports[name]) as t:
            t.load(start)
            dp = layout.get("dp", 1)
            out[name] = _step(t, dp=dp, micros=4 // dp)
            if name == "PP2":
                copies = [m.embedding.word_embeddings.weight for m in t.models if hasattr(m, "embedding")]
                rows, tokens = toy.grid(_parts(), dp=1, micros=2)
                for version in (1, 2):
                    t.step(rows[0], tokens, version)
                out["embedding"] = [float(w.double().pow(2).sum()) for w in copies]
                t.save(save)
    return out


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where = tmp_path_factory.mktemp("mtp")
    hf = toy.hf_dir(where / "hf", toy.hf_config() | ROUTED | {"num_nextn_predict_layers": DEPTHS})
    start = where / "start"
    out: dict[str, Any] = run_ranks(_one_rank, 1, hf, start, keep=True)[0]
    ports = {name: free_port() for name in dict.fromkeys(("PP2", *chosen(request, "name", LAYOUTS)))}
    both = run_ranks(_two_ranks, 2, hf, start, ports, where / "save", keep=True)
    for name in ports:
        assert both[0][name] == both[1][name], f"{name}: ranks report different metrics"
    return out | both[0] | {"embeddings": [both[0]["embedding"], both[1]["embedding"]]}


def test_it_is_megatrons_own_loss(runs: dict[str, Any]) -> None:
    """Oracle: the stock block with its roll, whole logits and torch's cross-entropy, one unpacked sample at a time. The
    statistic is its mean; each parameter's gradient is the policy's alone plus coefficient / depths / loss tokens times
    autograd's of the oracle: embedding, head and the whole main model learn from it. Two depths."""
    assert runs["4 micro-batches"]["mtp"] == pytest.approx(runs["stock"], rel=1e-5)
    assert len(runs["names"]) > 20 and all(runs["shared"].values())
    worst = max(runs["gap"], key=runs["gap"].__getitem__)
    assert runs["gap"][worst] < 2e-5, f"{worst}: {runs['gap'][worst]}"


@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_depend_on_the_layout(runs: dict[str, Any], name: str) -> None:
    """Targets are taken from the whole pack within each sample, so cutting, padding and packing may not move them: loss
    and gradient norm to 1e-5. Routes of the MTP layers are their own, so a near-tie could flip; none does here. Not
    covered: bf16, interleaved stages."""
    want = runs["4 micro-batches"]
    for key in ("loss", "mtp", "norm"):
        assert runs[name][key] == pytest.approx(want[key], rel=1e-5), key


def test_the_policy_loss_does_not_know_of_it(runs: dict[str, Any]) -> None:
    """With a vanishing coefficient the main model's gradients are those without MTP, and train/loss always is."""
    assert runs["tiny"] < 1e-6
    assert runs["off"]["mtp"] is None and runs["off"]["loss"] == pytest.approx(
        runs["4 micro-batches"]["loss"], rel=1e-6
    )
    assert runs["off"]["norm"] != pytest.approx(runs["4 micro-batches"]["norm"], rel=1e-3)


def test_the_two_embeddings_stay_one(runs: dict[str, Any]) -> None:
    """With pipeline stages the last holds a copy of the embedding; gradients of both are added, so after two steps the
    copies are still equal, bit for bit."""
    [first], [last] = runs["embeddings"]
    assert first == last
