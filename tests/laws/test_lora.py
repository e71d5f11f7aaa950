"""Laws of low-rank adapters: what is trained is bit for bit what is published, in every layout, and nothing else moves.

Oracles: torch's own W + alpha / rank * B A, and a trainer without adapters that loads what was published. Adapters act
on every kind of target at once, with B away from zero (at zero A has no gradient at all).
Not covered: more than two ranks, CUDA.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.config import LoraConfig, TrainerConfig
from megatron_bridge.convert.to_megatron import to_megatron
from megatron_bridge.families.registry import family_of
from miles_like.hf.checkpoint import write_hf
from miles_like.types import LossInputs, LossOutput
from tests.support import layouts, toy
from tests.support.chosen import chosen, later
from tests.support.layouts import EXPERTS, ROUTED, Case
from tests.support.refusals import Facts, check_refusal, refuses
from tests.support.spawn import free_port, run_ranks

Found = dict[str, Any]
LORA = {"rank": 4, "alpha": 6.0, "targets": ["attention", "experts", "shared_experts", "mlp"]}
STEPS = 2
UNDISTRIBUTED = {"dp": 2, "ep": 2, "distributed_optimizer": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2, experts too": {"tp": 2, "etp": 2},
    "TP2": {"tp": 2},
    "experts alone over two": {"dp": 2, "etp": 2},
    "EP2 without distributed optimizer": UNDISTRIBUTED,
    "PP2, recomputed": {"pp": 2, "first_stage_layers": 1, "recompute": "full"},
}

WITH_REFERENCE = {"lora": LORA, "reference": True, "lr": 1e-2}
GQA = {"lora": LORA | {"targets": ["attention", "experts", "mlp"]}}  # Qwen has no shared experts
MTP = {"lora": LORA, "mtp_coefficient": 0.3}
SPREAD = {
    "TP2, with a reference": Case("mla", {"tp": 2}, WITH_REFERENCE),
    "PP2xVPP2, with a reference": Case("mla", {"pp": 2, "vpp": 2}, WITH_REFERENCE),
    "CP2, with a reference": Case("mla", {"cp": 2}, WITH_REFERENCE),
    "TP2, GQA": Case("gqa", {"tp": 2}, GQA),
    "CP2, GQA": Case("gqa", {"cp": 2}, GQA),
    "PP2xVPP2, GQA, with a reference": Case("gqa", {"pp": 2, "vpp": 2}, WITH_REFERENCE | GQA),
    "PP2xVPP2, MTP": Case("mtp", {"pp": 2, "vpp": 2}, MTP),
    "CP2xEP2 over the same ranks, MTP": Case("mtp", {"cp": 2, "ep": 2}, MTP),
}
HERE = "tests/laws/test_lora.py"
FIRST = ("PP2xVPP2, GQA, with a reference",)
# the first is saved, and the second read again in another layout
ALWAYS = ("TP2, experts too", "EP2 without distributed optimizer")


class Recorded(toy.PolicyGradient):
    """Keeps the log-probabilities it was shown."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def __call__(self, inputs: LossInputs) -> LossOutput:
        self.seen += inputs.logprobs.detach().tolist()
        return super().__call__(inputs)


def _named(t: Any) -> dict[str, Tensor]:
    from megatron_bridge.optim.param_names import named_tensors

    return {name: x.detach().clone() for name, x in named_tensors(t.models, t.parallel)}


def _step(t: Any, step: int, dp: int) -> dict[str, float]:
    rows, tokens = toy.grid(toy.samples(8, seed=step, experts=EXPERTS), dp=dp, micros=4 // dp)
    return dict(t.step(rows[t.dp_rank], tokens, step + 1).metrics)


def _digest(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        n: hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest() for n, x in tensors.items()
    }


def _exported(t: Any) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in t.export()}


def _by_hand(held: dict[str, Tensor], tensors: Any) -> dict[str, Tensor]:
    """The Hugging Face tensors of a single rank's parameters, merged by the formula."""
    out = {}
    for name, value in held.items():
        if name.endswith(("lora_a", "lora_b")):
            continue
        at = name.removesuffix("weight")
        if at + "lora_a" in held:
            value = value + LORA["alpha"] / LORA["rank"] * (held[at + "lora_b"] @ held[at + "lora_a"])
        places = tensors.places_in(name)
        for place, part in zip(places, value.chunk(len(places)), strict=True):
            out[place.hf_name] = part[: place.shape[0]].to(tensors.dtype(place.entry))
    return out


def _published(
    hf: str, rank: int, world: int, ports: list[int], plain: Path, where: Path, layout: dict[str, Any]
) -> Any:
    """Trains adapters in bf16, publishes, and loads that into a trainer without adapters: both log-probabilities."""
    seen = []
    config = {"dtype": "bfloat16", "lr": 1e-2, **layout}
    rows, tokens = toy.grid(toy.samples(8, experts=EXPERTS), dp=1, micros=2)
    with toy.trainer(toy.config(hf, lora=LORA, **config), rank, world, ports[0], Recorded()) as t:
        t.load_weights(plain)
        for step in range(STEPS):
            _step(t, step, 1)
        tensors = _exported(t)
        if rank == 0:
            write_hf(where / "hf", iter(tensors.items()), json.loads((Path(hf) / "config.json").read_text()))
            to_megatron(where / "hf", where / "megatron")
        t._step.loss.seen.clear()
        t.evaluate(rows[0], tokens)
        seen.append(t._step.loss.seen)
    with toy.trainer(toy.config(hf, **config), rank, world, ports[1], Recorded()) as t:
        t.load_weights(plain)
        t.evaluate(rows[0], tokens)
        seen.append(list(t._step.loss.seen))
        t.load_weights(where / "megatron")
        t._step.loss.seen.clear()
        t.evaluate(rows[0], tokens)
        seen.append(t._step.loss.seen)
    return dict(zip(("adapters", "untrained", "merged"), seen, strict=True))


def _refused(config: TrainerConfig, rank: int, world: int, port: int, load: Path | None = None) -> str:
    try:
        with toy.trainer(config, rank, world, port) as t:
            t.load_weights(load)
            return "no error"
    except ValueError as e:
        from megatron_bridge.device.parallel import close_parallel

        close_parallel()
        return str(e)


def _one_rank(rank: int, world: int, port: int, hf: str, moe_only: str, where: Path, spread: dict[str, Case]) -> Found:
    out: Found = {}
    rows, tokens = toy.grid(toy.samples(8, experts=EXPERTS), dp=1, micros=2)
    with toy.trainer(toy.config(hf), rank, world, port) as t:
        toy.scramble(t)
        t.save(where / "plain")
        out["plain"] = dict(t.evaluate(rows[0], tokens)), _digest(_exported(t))
    with toy.trainer(toy.config(hf, lora=LORA), rank, world, free_port()) as t:
        t.load_weights(where / "plain")
        out["adapters at zero"] = dict(t.evaluate(rows[0], tokens)), _digest(_exported(t))
        served = [p for p in t.models[0].parameters() if hasattr(p, "served")]
        out["not the weight"] = sum(not torch.equal(p, p.served()) for p in served), len(served) > 0
        layouts.bend(t)
        before = _named(t)
        t.save(where / "bent")
        want, got = _by_hand(before, family_of(t.hf).bind(t.hf)), _exported(t)
        out["not as by hand"] = [n for n in want.keys() | got.keys() if not torch.equal(want[n], got[n])]
        out["merged"] = sum(_digest(got)[n] != x for n, x in out["plain"][1].items())
        out["metrics"] = [_step(t, step, 1) for step in range(STEPS)]
        out["moved"] = [n for n, x in _named(t).items() if not torch.equal(x, before[n])]
        out["adapters"] = [n for n in before if "lora_" in n]
        t.load_weights(where / "plain")
        out["plain again"] = _digest(_exported(t)) == out["plain"][1]
    ports = [free_port() for _ in range(2)]
    out["published"] = _published(hf, rank, world, ports, where / "plain", where / "one", {})
    lora = {"rank": 65, "targets": ["attention", "experts"]}
    out["rank"] = _refused(toy.config(hf, lora=lora), rank, world, free_port())
    dense = {"rank": 2, "targets": ["attention", "mlp"]}
    out["target"] = _refused(toy.config(moe_only, lora=dense), rank, world, free_port())
    out["adapters lost"] = _refused(toy.config(hf), rank, world, free_port(), where / "bent")
    out["spread"] = layouts.references(rank, world, port, where, spread)
    return out


def _two_ranks(
    rank: int, world: int, port: int, hf: str, where: Path, ports: dict[str, int], spread: dict[str, Case]
) -> Found:
    out: Found = {}
    for name, layout in ((name, LAYOUTS[name]) for name in LAYOUTS if name in ports):
        with toy.trainer(toy.config(hf, lora=LORA, **layout), rank, world, ports[name]) as t:
            if name == "TP2, experts too":
                t.save(where / "fresh")
            t.load_weights(where / ("cut" if name == "EP2 without distributed optimizer" else "bent"))
            if name == "TP2, experts too":
                t.save(where / "cut")
            if name == "EP2 without distributed optimizer":
                t.save(where / "dealt")
            before = _named(t)
            out[name] = {"metrics": [_step(t, 0, layout.get("dp", 1))]}
            if name == "TP2, experts too":
                t.save(where / "half way")
            out[name]["metrics"].append(_step(t, 1, layout.get("dp", 1)))
            out[name]["moved"] = [n for n, x in _named(t).items() if not torch.equal(x, before[n])]
            out[name]["adapters"] = [n for n in before if "lora_" in n]
    with toy.trainer(toy.config(hf, lora=LORA, dp=2), rank, world, ports["DP2"]) as t:
        fresh = _named(t)
        t.load_weights(where / "fresh")
        again = _named(t)
        out["other start"] = [n for n in fresh if "lora_" in n and not torch.equal(fresh[n], again[n])]
        t.load_weights(where / "bent")
        bent = _named(t)
        t.load_weights(where / "dealt")
        out["resharded otherwise"] = [n for n, x in _named(t).items() if not torch.equal(x, bent[n])]
        t.load(where / "half way")
        out["resumed"] = _step(t, 1, 2)
    if "one" in ports:
        out["published"] = _published(
            hf, rank, world, [ports["one"], ports["two"]], where / "plain", where / "two", {"tp": 2, "etp": 2}
        )
    out["spread"] = layouts.in_layouts(rank, world, port, where, spread)
    return out


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    where = tmp_path_factory.mktemp("lora")
    hf = toy.hf_dir(where / "hf", toy.hf_config() | ROUTED)
    moe_only = toy.hf_dir(where / "moe_only", toy.hf_config() | ROUTED | {"first_k_dense_replace": 0})
    spread = {name: SPREAD[name] for name in chosen(request, "name", SPREAD)}
    (one,) = run_ranks(_one_rank, 1, hf, moe_only, where, spread, timeout_s=500, keep=True)
    asked = {*ALWAYS, *chosen(request, "layout", LAYOUTS)}
    published = ("one", "two") if chosen(request, "ranks", ["TP2"]) else ()
    ports = {name: free_port() for name in [*(n for n in LAYOUTS if n in asked), "DP2", *published]}
    return {"one": one, "both": run_ranks(_two_ranks, 2, hf, where, ports, spread, timeout_s=500, keep=True)}


def test_fresh_adapters_change_nothing(found: Found) -> None:
    """B is zero, so W' is W: a model loaded from a checkpoint without adapters is that checkpoint's, bit for bit. (A
    product of fp32 matrices may differ in its last bit by where in memory they lie.)"""
    (metrics, tensors), (plain_metrics, plain) = found["one"]["adapters at zero"], found["one"]["plain"]
    assert tensors == plain and found["one"]["plain again"] and found["one"]["not the weight"] == (0, True)
    assert metrics == pytest.approx(plain_metrics, rel=1e-6)


def test_what_is_published_is_the_formula(found: Found) -> None:
    """W + alpha / rank * B A in fp32, rounded once to the checkpoint's dtype, for fused matrices too; all that has an
    adapter changed."""
    assert found["one"]["not as by hand"] == []
    gated = sum("linear_fc1.lora_a" in name for name in found["one"]["adapters"])
    assert found["one"]["merged"] == len(found["one"]["adapters"]) // 2 + gated  # gate and up are two tensors


@pytest.mark.parametrize("ranks", later(["one", "TP2"], ["one"], beside=HERE))
def test_published_weights_give_the_log_probabilities_that_were_trained(found: Found, ranks: str) -> None:
    """Bitwise, through the checkpoint's files, in bf16: the adapters are merged in the weights' own dtype before they
    are used, so training sees the rounding that serving has."""
    for run in [found["one"]] if ranks == "one" else found["both"]:
        assert run["published"]["adapters"] == run["published"]["merged"] != run["published"]["untrained"]


@pytest.mark.parametrize("layout", later(LAYOUTS, ALWAYS, beside=HERE))
def test_the_step_does_not_depend_on_the_layout(found: Found, layout: str) -> None:
    """An adapter that is whole beside a divided weight has only a part of its gradient on each rank, and each of its
    copies must enter the norm once, also where the expert group is not the dense one."""
    for rank in found["both"]:
        for want, got in zip(found["one"]["metrics"], rank[layout]["metrics"], strict=True):
            for key in ("train/loss", "train/grad_norm"):
                assert got[key] == pytest.approx(want[key], rel=1e-5), key


@pytest.mark.parametrize("name", later(SPREAD, FIRST, beside=HERE))
def test_products_of_layouts_and_a_reference_change_nothing_either(found: Found, name: str) -> None:
    """Virtual stages, context parallelism, query-group attention, draft layers, and a reference that was kept with its
    adapters (and is penalized for leaving): two steps to 1e-5, and the gradient of every adapter to 2e-5 of its norm.
    Draft layers have no adapters: their loss trains those of the layers below."""
    case, key = SPREAD[name], SPREAD[name].key
    want = found["one"]["spread"][key]
    for rank in found["both"]:
        got = rank["spread"][name]
        for mine, alone in zip(got.metrics, want.metrics, strict=True):
            more = {"train/mtp_loss": case.model == "mtp", "train/kl_ref": "reference" in case.settings}
            for metric in ("train/loss", "train/grad_norm", *(name for name, there in more.items() if there)):
                assert mine[metric] == pytest.approx(alone[metric], rel=1e-5), metric
        assert got.worst[1] < 2e-5, got.worst
    if "reference" in case.settings:  # which chooses its own routes, while the policy replays recorded ones
        assert all(m["train/kl_ref"] > 1e-3 for m in want.metrics)


def test_only_adapters_move(found: Found) -> None:
    """All of them, and neither base weights nor norms, router or embedding."""
    for run in [found["one"], *(rank[n] for rank in found["both"] for n in LAYOUTS if n in rank)]:
        assert sorted(run["moved"]) == sorted(run["adapters"]) != []


def test_adapters_start_alike_and_reshard_bitwise(found: Found) -> None:
    """The initial values are drawn from the parameter's name, and a checkpoint holds whole adapters: one rank -> TP2 ->
    EP2 -> one rank is the identity. A run saved in one layout resumes in another."""
    for rank in found["both"]:
        assert rank["other start"] == [] and rank["resharded otherwise"] == []
        for key in ("train/loss", "train/grad_norm"):
            assert rank["resumed"][key] == pytest.approx(found["one"]["metrics"][1][key], rel=1e-5)


def test_adapters_that_cannot_be_are_refused(found: Found) -> None:
    """With both numbers, and before a checkpoint's trained adapters are silently dropped."""
    check_refusal(found["one"]["rank"], "lora.rank", 65, 64)
    check_refusal(found["one"]["target"], "'mlp'")
    check_refusal(found["one"]["adapters lost"], "LoRA", "bent")


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"lora": {"alpha": 3.0}}, ("lora.alpha", 3.0)),
        ({"lora": {"targets": ["mlp"]}}, ("lora.targets", "lora.rank", 0)),
        ({"lora": {"rank": 2, "targets": []}}, ("lora.rank", 2, "lora.targets")),
        ({"lora": {"rank": 2}, "optimizer": {"frozen": ["*.lora_a"]}}, ("optimizer.frozen",)),
        ({"lora": {"rank": 2}, "router_bias_update_rate": 0.1}, ("router_bias_update_rate", 0.1)),
    ],
)
def test_keys_that_would_do_nothing_are_refused(keys: dict[str, Any], facts: Facts) -> None:
    """LoRA freezes all but its adapters, so whatever would train or freeze something else contradicts it."""
    with refuses(ValueError, *facts):
        TrainerConfig.model_validate(toy.config("").model_dump() | keys)
    assert LoraConfig().rank == 0
