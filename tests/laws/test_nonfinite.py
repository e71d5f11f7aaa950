"""Law: a step that is not finite changes nothing, and every rank names the same first place.

A nan spreads in one pass to every rank and every weight's gradient, so what a user sees afterwards is all nan. Not
covered: more than two ranks, CUDA, TransformerEngine's modules.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from miles_like.types import LossInputs, LossOutput, MicroBatch
from tests.support import toy
from tests.support.chosen import chosen, later
from tests.support.refusals import check_refusal
from tests.support.spawn import free_port, run_ranks

NAN, INF = float("nan"), float("inf")
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"dp": 2, "ep": 2},
    "PP2": {"pp": 2, "first_stage_layers": 1},
    "TP2": {"tp": 2},
    "CP2": {"cp": 2},
    "VPP2": {"parallel": {"pp": 2, "vpp": 2}, "mode": "off"},
    "EP2 recompute": {"dp": 2, "ep": 2, "recompute": "full"},
    "PP2 recompute": {"pp": 2, "first_stage_layers": 2, "recompute": "full"},
}
HERE = "tests/laws/test_nonfinite.py"
CASES = later(LAYOUTS, ("EP2",), beside=HERE)
SKIPS = {"skip": True, "skip without distributed optimizer": False}  # name -> whether the optimizer is distributed
LEFT = ("left PP2", "left VPP2")
Messages = dict[str, str]


class Moody(toy.PolicyGradient):
    """A loss that is nan once, or too steep for fp32 squares."""

    mode = ""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        loss, stats = super().__call__(inputs)
        if self.mode == "once":
            self.mode = ""
            return loss * NAN, stats
        if self.mode == "slope":
            return loss + (inputs.logprobs - inputs.logprobs.detach()).abs().sqrt(), stats  # value 0, slope 0 / 0
        return loss * (1e25 if self.mode == "steep" else 1.0), stats


class SteepBackward(torch.autograd.Function):
    """The identity, but for an infinite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * INF


def config(hf: str, **more: Any) -> Any:
    layout = more.pop("parallel", None)
    cfg = toy.config(hf, **more)
    return cfg if layout is None else cfg.model_validate({**cfg.model_dump(), "parallel": layout})


def batch(cfg: Any, seed: int = 0) -> tuple[list[list[MicroBatch]], int]:
    parts = toy.samples(8, seed=seed)
    if cfg.replay.mode == "off":
        parts = [replace(p, routing=None) for p in parts]  # of another number of layers
    dp = cfg.parallel.dp
    return toy.grid(parts, dp=dp, micros=4 // dp)


def message(t: Any, rows: Sequence[Sequence[MicroBatch]], tokens: int) -> str:
    try:
        t.step(rows[t.dp_rank], tokens, 7)
    except RuntimeError as e:
        return str(e)
    return "no error"


def module(t: Any, name: str) -> Any:
    """The module of that name with global layer numbers, where this rank has it."""
    for model in t.models:
        for layer in model.decoder.layers:
            prefix = f"decoder.layers.{layer.layer_number - 1}."
            if name.startswith(prefix):
                return layer.get_submodule(name.removeprefix(prefix))
    return None


def poisoned(rows: list[list[MicroBatch]], d: int, m: int, value: float) -> list[list[MicroBatch]]:
    bad = replace(rows[d][m], advantages=torch.full_like(rows[d][m].advantages, value))
    return [[bad if (i, j) == (d, m) else x for j, x in enumerate(row)] for i, row in enumerate(rows)]


def _places(rank: int, world: int, port: int, hf: str, layout: dict[str, Any], expert: tuple[str, int]) -> Messages:
    """Each kind of cause under one layout. `expert`: (a local expert of `rank` expert[1], with global layer)."""
    loss, out, cfg = Moody(), {}, config(hf, **layout)
    with toy.trainer(cfg, rank, world, port, loss) as t:
        rows, tokens = batch(cfg)
        before = _state(t)
        out["advantage"] = message(t, poisoned(rows, cfg.parallel.dp - 1, 1, NAN), tokens)
        for mode in ("once", "steep", "slope"):
            loss.mode = mode
            out[mode] = message(t, rows, tokens)
        loss.mode = ""
        steep = module(t, "decoder.layers.1.mlp.shared_experts.linear_fc1") if rank == world - 1 else None
        if cfg.parallel.pp == 2:
            steep = module(t, "decoder.layers.1.mlp.shared_experts.linear_fc1")
        handle = steep and steep.register_forward_hook(lambda m, i, o: (SteepBackward.apply(o[0]), *o[1:]))
        out["backward"] = message(t, rows, tokens)
        if handle:
            handle.remove()
        out["unharmed"] = str(_same(before, _state(t)))
        name, owner = expert
        victim = module(t, name) if rank == owner else None
        if victim is not None:
            with torch.no_grad():
                victim.weight[0, 0] = NAN
        out["weight"] = message(t, rows, tokens)
    return out


def _state(t: Any) -> dict[str, Tensor]:
    """Weights, routing biases, the optimizer's master weights and moments."""
    out = {f"{i} {k}": v for i, m in enumerate(t.models) for k, v in m.state_dict().items() if torch.is_tensor(v)}
    for i, part in enumerate(t.optimizer.chained_optimizers):
        inner = part.optimizer
        for j, group in enumerate(inner.param_groups):
            for k, p in enumerate(group["params"]):
                out[f"master {i} {j} {k}"] = p
                out |= {f"{key} {i} {j} {k}": v for key, v in inner.state[p].items() if torch.is_tensor(v)}
    return {k: v.detach().clone() for k, v in out.items()}


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _skips(rank: int, world: int, hf: str, ports: list[int], distributed: bool) -> dict[str, Any]:
    """good, bad, good beside good, good."""
    more = {"dp": 2, "ep": 2, "router_bias_update_rate": 1e-2, "distributed_optimizer": distributed}
    cfg = config(hf, on_nonfinite="skip", **more)
    ends, out = [], {}
    for with_bad, port in zip((True, False), ports, strict=True):
        with toy.trainer(cfg, rank, world, port) as t:
            rows, tokens = batch(cfg, 1)
            t.step(rows[t.dp_rank], tokens, 1)
            if with_bad:
                before = _state(t)
                report = t.step(poisoned(rows, 0, 0, INF)[t.dp_rank], tokens, 2)
                out["bitwise"] = _same(before, _state(t)) and any("exp_avg" in k for k in before)
                out["skipped"], out["version"] = report.metrics["train/skipped"], report.version
                out["norm"] = "train/grad_norm" in report.metrics
                grads = [p.main_grad for m in t.models for p in m.parameters()]
                out["clean"] = not any(bool(g.any()) for g in grads)
            rows, tokens = batch(cfg, 2)
            last = dict(t.step(rows[t.dp_rank], tokens, 3).metrics)
            ends.append((last, _state(t)))
    out["next"] = ends[0][0] == ends[1][0] and _same(ends[0][1], ends[1][1])
    out["went on"] = ends[0][0]["train/skipped"]
    return out


class Failing(toy.PolicyGradient):
    """A bug in a loss function."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        raise KeyError("a bug")


def _left_within(rank: int, world: int, port: int, cfg: Any) -> dict[str, Any]:
    """A schedule that an error left in its midst: the last stage's own, or that of a stage whose neighbour has gone."""
    silent: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda what: silent.append(str(what.exc_value))
    with toy.trainer(cfg, rank, world, port, Failing()) as t:
        rows, tokens = batch(cfg)
        groups = [g for chunk in t.chunks for g in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]
        try:
            t.step(rows[t.dp_rank], tokens, 1)
            error = None
        except (KeyError, RuntimeError) as e:
            error = e  # its traceback keeps the schedule's frames
        syncs = all(g.is_last_microbatch for g in groups)
    raised = type(error).__name__
    del error
    gc.collect()
    sys.unraisablehook = hook
    return {"raised": raised, "syncs": syncs, "silent": silent}


def _bad_rows(rank: int, world: int, port: int, hf: str) -> Messages:
    """What only rank 1 is given wrongly."""
    out: Messages = {}
    cfg = config(hf, dp=2, ep=2)
    with toy.trainer(cfg, rank, world, port) as t:
        rows, tokens = batch(cfg)
        nothing = toy.pack([toy.sample(0, 0)])
        cases = {
            "empty row": [rows[0], []],
            "empty micro-batch": [rows[0], [rows[1][0], nothing]],
            "no routes": [rows[0], [rows[1][0], replace(rows[1][1], routing=None)]],
            "fewer": [rows[0], rows[1][:1]],
            "token": [rows[0], [rows[1][0], replace(rows[1][1], tokens=rows[1][1].tokens + toy.VOCAB)]],
            "label": [rows[0], [rows[1][0], replace(rows[1][1], labels=rows[1][1].labels - toy.VOCAB)]],
            "no loss": [[replace(m, loss_mask=torch.zeros_like(m.loss_mask)) for m in row] for row in rows],
        }
        for name, case in cases.items():
            try:
                t.step(case[t.dp_rank], 0 if name == "no loss" else tokens, 1)
            except ValueError as e:
                out[name] = str(e)
        out["after"] = f"{t.step(rows[t.dp_rank], tokens, 1).metrics['train/loss']:.3f}"
    return out


def _biased(rank: int, world: int, port: int, hf: str) -> dict[str, Any]:
    """Of a model whose linears hand their biases on; and a batch that is refused when it has been computed."""
    cfg = config(hf, router_bias_update_rate=1e-2)
    with toy.trainer(cfg, rank, world, port) as t:
        rows, tokens = batch(cfg)
        out: dict[str, Any] = {"advantage": message(t, poisoned(rows, 0, 1, NAN), tokens)}
        out["hooks left"] = sum(bool(p._backward_hooks) for p in t.models[0].parameters())
        before = _state(t)
        try:
            t.step(rows[0], tokens + 1, 7)
        except ValueError as e:
            out["miscounted"] = str(e)
        return out | {"unharmed": _same(before, _state(t))}


EXPERT = {  # a local expert's matrix, the rank that holds it
    "EP2": ("decoder.layers.2.mlp.experts.local_experts.3.linear_fc1", 1),
    "EP2 recompute": ("decoder.layers.2.mlp.experts.local_experts.3.linear_fc1", 1),
    "PP2": ("decoder.layers.2.mlp.experts.local_experts.3.linear_fc1", 1),
    "PP2 recompute": ("decoder.layers.2.mlp.experts.local_experts.3.linear_fc1", 1),
    "TP2": ("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1", 1),
    "CP2": ("decoder.layers.1.mlp.experts.local_experts.3.linear_fc1", 0),
    "VPP2": ("decoder.layers.2.mlp.experts.local_experts.3.linear_fc1", 0),
}


def _two_ranks(
    rank: int, world: int, port: int, hf: str, deeper: str, ports: dict[str, int], asked: list[str]
) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in asked:
        layout = LAYOUTS[name]
        out[name] = _places(rank, world, ports[name], deeper if name == "VPP2" else hf, layout, EXPERT[name])
    for name in (name for name in SKIPS if f"{name} 0" in ports):
        out[name] = _skips(rank, world, hf, [ports[f"{name} {i}"] for i in range(2)], SKIPS[name])
    out["rows"] = _bad_rows(rank, world, port, hf)
    for name in (name for name in LEFT if name in ports):
        layout = name.removeprefix("left ")
        out[name] = _left_within(
            rank, world, ports[name], config(deeper if layout == "VPP2" else hf, **LAYOUTS[layout])
        )
    return out


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    where, asked = tmp_path_factory.mktemp("nonfinite"), chosen(request, "layout", LAYOUTS)
    hf, deeper = toy.hf_dir(where / "hf"), toy.hf_dir(where / "deeper")
    text = Path(deeper, "config.json").read_text()
    Path(deeper, "config.json").write_text(text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    skips, left = chosen(request, "skipping", SKIPS), chosen(request, "left", LEFT)
    ports = {name: free_port() for name in [*asked, *(f"{name} {i}" for name in skips for i in range(2)), *left]}
    ranks = run_ranks(_two_ranks, 2, hf, deeper, ports, asked, timeout_s=600)
    for name in [*asked, "rows"]:
        for case in ranks[0][name]:
            assert ranks[0][name][case] == ranks[1][name][case], f"{name}, {case}: ranks disagree"
    return ranks[0] | {name: [r[name] for r in ranks] for name in left}


@pytest.mark.parametrize("layout", CASES)
def test_the_first_place_is_named(found: dict[str, Any], layout: str) -> None:
    """A weight, a loss input, a gradient that arises only backward, squares that overflow, and what does not return:
    in each the sentence has the cause in it, the micro-batch, and the step."""
    s: Messages = found[layout]
    for case in ("advantage", "once", "steep", "slope", "backward", "weight"):
        print(case, "::", s[case])
    name, owner = EXPERT[layout]
    expert = name.replace("local_experts.3", "local_experts.11") if layout.startswith("EP2") else name
    check_refusal(s["weight"], 7, expert, 0, f"{expert}.weight", "nan", 1, owner)
    row = 1 if layout.startswith("EP2") else 0
    check_refusal(s["advantage"], 7, "logprobs", "advantages", "nan", 1, row)
    check_refusal(s["once"])
    check_refusal(
        s["steep"], "in the norm itself", "every gradient is finite", unrecorded="it names the largest gradient"
    )
    check_refusal(s["slope"], 0)
    first = "it names the parameter that the layout reaches first"
    check_refusal(s["backward"], "gradient", "micro-batch 0", unrecorded=first)
    assert "decoder.layers.1.mlp.shared_experts.linear_fc1" in s["backward"]


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    hf = toy.hf_dir(tmp_path_factory.mktemp("biased"), toy.hf_config() | {"attention_bias": True})
    return run_ranks(_biased, 1, hf, keep=True)[0]  # type: ignore[no-any-return]


def test_a_bias_that_a_linear_returns_is_no_value_of_a_micro_batch(biased: dict[str, Any]) -> None:
    """It is a weight: a hook on it would see the gradients of all later micro-batches and steps, as its first's."""
    check_refusal(biased["advantage"], 1)
    assert biased["hooks left"] == 0


def test_a_miscounted_step_changes_nothing(biased: dict[str, Any]) -> None:
    """It is refused after backward, when megatron has moved the routing biases."""
    check_refusal(biased["miscounted"], "loss_tokens")
    assert biased["unharmed"]


@pytest.mark.parametrize("layout", CASES)
def test_a_refused_step_changes_nothing(found: dict[str, Any], layout: str) -> None:
    """Weights, master weights, moments and routing biases, bit for bit, after five refusals."""
    assert found[layout]["unharmed"] == "True"


@pytest.mark.parametrize("skipping", later(SKIPS, ("skip",), beside=HERE))
def test_a_skipped_step_is_as_if_it_had_not_been(found: dict[str, Any], skipping: str) -> None:
    """Bit for bit, and so is the step after it; megatron has by then moved the routing biases once already."""
    s = found[skipping]
    assert s["bitwise"] and s["clean"] and s["next"]
    assert (s["skipped"], s["went on"], s["version"], s["norm"]) == (1.0, 0.0, 2, False)


def test_what_one_rank_is_given_wrongly_ends_the_call_on_all(found: dict[str, Any]) -> None:
    """The others would wait in a collective for a rank that has left; and the trainer is as good as before."""
    s = found["rows"]
    check_refusal(s["empty row"], 1)
    check_refusal(s["empty micro-batch"], 1)
    for case in ("token", "label"):
        check_refusal(s[case], 1, toy.VOCAB)
    check_refusal(s["no routes"], 1, "replay.mode", "r3", 1)
    check_refusal(s["fewer"], 1, 2)
    check_refusal(s["no loss"], 0)
    assert float(s["after"]) == float(s["after"])


@pytest.mark.parametrize("left", later(LEFT, ("left VPP2",), beside=HERE))
def test_an_error_amid_a_pipeline_leaves_nothing_half_done(found: dict[str, Any], left: str) -> None:
    """Pipeline schedules switch gradient reduction off by hand. After an error it is on again at once, and closing the
    trainer prints nothing of an exception that the caller cannot catch."""
    for rank in found[left]:
        assert rank["raised"] != "NoneType" and rank["syncs"]
        assert rank["silent"] == []
    assert found[left][1]["raised"] == "KeyError"
