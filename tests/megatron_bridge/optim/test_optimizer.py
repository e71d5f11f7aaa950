"""Which parameters, identified by their names, are decayed and which are trained, in every layout."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import toy
from tests.support.chosen import chosen, later
from tests.support.refusals import check_refusal
from tests.support.spawn import free_port, run_ranks
from tests.support.tiny_models import tiny_dense

STEPS = 2
Found = dict[str, Any]
FROZEN: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "embedding": ("embedding.*",),
    "first stage": ("embedding.*", "decoder.layers.0.*"),  # all of the first stage of PP2
    "one layer": ("decoder.layers.2.*",),
    "a layer's experts": ("decoder.layers.1.mlp.experts.*", "decoder.layers.1.mlp.router.expert_bias"),
    "all experts": ("*.experts.*",),
    "all but experts": (
        "embedding.*",
        "output_layer.*",
        "decoder.final_layernorm.*",
        "*.input_layernorm.*",
        "*.pre_mlp_layernorm.*",
        "*.self_attention.*",
        "*.router.*",
        "*.mlp.linear_fc?.*",
        "*.shared_experts.*",
    ),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "PP2, recomputed": {"pp": 2, "first_stage_layers": 1, "recompute": "full"},
    "EP2": {"dp": 2, "ep": 2},
    "EP2 without distributed optimizer": {"dp": 2, "ep": 2, "distributed_optimizer": False},
    "TP2": {"tp": 2},
}
CASES = [
    ("EP2", "nothing"),
    ("PP2, recomputed", "embedding"),
    ("PP2, recomputed", "first stage"),
    ("TP2", "first stage"),
    ("PP2, recomputed", "one layer"),
    ("EP2", "a layer's experts"),
    ("PP2, recomputed", "all experts"),
    ("EP2 without distributed optimizer", "all experts"),
    ("PP2, recomputed", "all but experts"),
    ("EP2", "all but experts"),
    ("TP2", "all but experts"),
]
FIRST = [("PP2, recomputed", "first stage"), ("EP2 without distributed optimizer", "all experts")]
HERE = "tests/megatron_bridge/optim/test_optimizer.py"
EACH = pytest.mark.parametrize("case", later(CASES, FIRST, beside=HERE), ids="-".join)


def _config(hf: str, frozen: str, **layout: Any) -> Any:
    optimizer = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-4, "frozen": FROZEN[frozen]}
    return toy.config(hf, **layout, optimizer=optimizer, router_bias_update_rate=1e-3)


def _tensors(t: Any) -> dict[str, torch.Tensor]:
    from megatron_bridge.optim.param_names import named_tensors

    return {name: x.detach().clone() for name, x in named_tensors(t.models, t.parallel)}


def _train(t: Any, dp: int, save: Path | None = None) -> Found:
    """Metrics of the steps, which parameters moved, and whether a resumed last step is the one that was taken."""
    before, metrics = _tensors(t), []
    exported = {name: x.clone() for name, x in t.export()}
    for step in range(STEPS):
        if save is not None and step == STEPS - 1:
            t.save(save)
        rows, tokens = toy.grid(toy.samples(8, seed=step), dp=dp, micros=4 // dp)
        metrics.append(dict(t.step(rows[t.dp_rank], tokens, step + 1).metrics))
    after = _tensors(t)
    out = {"metrics": metrics, "moved": {n: not torch.equal(before[n], after[n]) for n in before}}
    out["published unchanged"] = [n for n, x in t.export() if torch.equal(x, exported[n])]
    if save is not None:
        t.load(save)
        out["resumed"] = dict(t.step(rows[t.dp_rank], tokens, STEPS).metrics)
        out["same weights"] = all(torch.equal(x, after[n]) for n, x in _tensors(t).items())
    return out


def _one_rank(rank: int, world: int, port: int, hf: str, where: Path, ports: dict[str, int]) -> Found:
    out: Found = {}
    for name in ports:
        with toy.trainer(_config(hf, name), rank, world, ports[name]) as t:
            if name == "nothing":
                toy.scramble(t)
                t.save(where / "start")
            t.load_weights(where / "start")
            out[name] = _train(t, 1)
    return out


def _refused(hf: str, rank: int, world: int, port: int, **optimizer: Any) -> str:
    try:
        with toy.trainer(toy.config(hf, pp=2, first_stage_layers=1, optimizer=optimizer), rank, world, port):
            return "no error"
    except ValueError as e:
        from megatron_bridge.device.parallel import close_parallel

        close_parallel()
        return str(e)


def _decayed(hf: str, rank: int, world: int, port: int) -> Found:
    """AdamW's step without a gradient is the decay alone: w * (1 - lr * weight_decay)."""
    from megatron_bridge.optim.optimizer import apply_gradients

    optimizer = {"lr": 0.5, "weight_decay": 0.1, "no_decay": ["*.2.mlp.experts.local_experts.9.*", "output_layer.*"]}
    with toy.trainer(toy.config(hf, dp=2, ep=2, optimizer=optimizer), rank, world, port) as t:
        toy.scramble(t)
        before = _tensors(t)
        t.optimizer.zero_grad()
        for chunk in t.chunks:
            chunk.zero_grad_buffer()
        apply_gradients(t.optimizer, lr=0.5, clip=1.0)
        after = _tensors(t)
    ratio = {n: torch.equal(after[n], x) or float((after[n] - 0.95 * x).abs().max()) for n, x in before.items()}
    return {n: "kept" if r is True else "decayed" if r < 1e-7 else f"off by {r}" for n, r in ratio.items()}


def _tied(rank: int, world: int, port: int, hf: str, port_too: int) -> Found:
    """A tied embedding named by its own name, over the stages that hold it: frozen, and not decayed."""
    from megatron_bridge.device.collective_errors import gather_objects

    out: Found = {}
    for key, at in {"frozen": port, "no_decay": port_too}.items():
        optimizer = {"lr": 0.5, "weight_decay": 0.1, key: ["embedding.*"]}
        config = toy.config(hf, mode="off", pp=world, optimizer=optimizer, distributed_optimizer=False)
        with toy.trainer(config, rank, world, at) as t:
            held = t.models[0].shared_embedding_or_output_weight()
            groups = t.optimizer.param_groups
            out[key] = [g["wd_mult"] for g in groups if any(p is held for p in g["params"])]
            if key == "frozen" and not any(
                gather_objects(held.requires_grad)
            ):  # on one stage alone a step waits for ever
                before = held.detach().clone()
                rows, tokens = toy.grid(toy.samples(4, layers=()), dp=1, micros=2)
                t.step(rows[0], tokens, 1)
                out["kept"] = torch.equal(before, held)
    return out


def _two_ranks(
    rank: int, world: int, port: int, hf: str, where: Path, ports: dict[str, int], asked: list[tuple[str, str]]
) -> Found:
    out: Found = {}
    for layout, frozen in asked:
        case = f"{frozen}, {layout}"
        with toy.trainer(_config(hf, frozen, **LAYOUTS[layout]), rank, world, ports[case]) as t:
            t.load_weights(where / "start")
            out[case] = _train(t, LAYOUTS[layout].get("dp", 1), where / case)
    out["decay"] = _decayed(hf, rank, world, ports["decay"])
    out["typo"] = _refused(hf, rank, world, ports["typo"], frozen=["embedding.*", "decoder.layers.7.*"])
    out["all"] = _refused(hf, rank, world, ports["all"], frozen=["*"])
    out["decay typo"] = _refused(hf, rank, world, ports["decay typo"], no_decay=["*.bais"])
    out["one expert"] = _refused(hf, rank, world, ports["one expert"], frozen=["*.1.*.local_experts.9.*"])
    return out


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    where, asked = tmp_path_factory.mktemp("optimizer"), chosen(request, "case", CASES)
    patterns = {*chosen(request, "frozen", FROZEN), *(frozen for _, frozen in asked)}
    frozen = [name for name in FROZEN if name in patterns]
    hf = toy.hf_dir(where / "hf")
    (one,) = run_ranks(
        _one_rank, 1, hf, where, {name: free_port() for name in dict.fromkeys(("nothing", *frozen))}, keep=True
    )
    names = [*(f"{f}, {layout}" for layout, f in CASES), "decay", "typo", "all", "decay typo", "one expert"]
    both = run_ranks(_two_ranks, 2, hf, where, {name: free_port() for name in names}, asked, keep=True)
    return {"one": one, "both": both}


def _is_frozen(frozen: str, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in FROZEN[frozen])


@pytest.mark.parametrize("frozen", later(FROZEN, [frozen for _, frozen in FIRST], beside=HERE))
def test_exactly_what_is_named_stays(found: Found, frozen: str) -> None:
    """Stages count their layers and expert ranks their experts from 0: a pattern means the global number everywhere.
    What is frozen is published as it was, bit for bit."""
    runs = [found["one"][frozen]] + [
        rank[name] for rank in found["both"] for name in rank if name.startswith(f"{frozen}, ")
    ]
    for run in runs:
        for name, moved in run["moved"].items():
            assert moved != _is_frozen(frozen, name), name
    kept = [run["published unchanged"] for run in runs]
    assert all(sorted(names) == sorted(kept[0]) for names in kept)
    assert len(kept[0]) == {"nothing": 0, "embedding": 1, "a layer's experts": 49}.get(frozen, len(kept[0]))


@EACH
def test_loss_and_norm_do_not_depend_on_the_layout(found: Found, case: tuple[str, str]) -> None:
    """Recomputation would silently drop the gradients of a layer whose input needs none, and a wholly frozen stage
    could not run backward: activations require gradients from the embedding on."""
    layout, frozen = case
    for run in (rank[f"{frozen}, {layout}"] for rank in found["both"]):
        for want, got in zip(found["one"][frozen]["metrics"], run["metrics"], strict=True):
            for key in ("train/loss", "train/grad_norm"):
                assert got[key] == pytest.approx(want[key], rel=1e-5), key


@EACH
def test_a_frozen_model_resumes_bitwise(found: Found, case: tuple[str, str]) -> None:
    """Also where a rank, a stage or a kind of parameter has nothing to train, hence no optimizer state."""
    layout, frozen = case
    for run in (rank[f"{frozen}, {layout}"] for rank in found["both"]):
        assert run["resumed"] == run["metrics"][-1] and run["same weights"]


def test_matrices_are_decayed_but_for_those_named(found: Found) -> None:
    """Without a gradient AdamW's step is w -> w (1 - lr * weight_decay), so each parameter shows the settings of its
    group. Megatron leaves the multipliers of groups to its own scheduler, which is not used here."""
    names = {name: kind for rank in found["both"] for name, kind in rank["decay"].items()}
    for name, kind in names.items():
        one_dimensional = "layernorm" in name or "expert_bias" in name
        named = ".2.mlp.experts.local_experts.9." in name or name.startswith("output_layer.")
        assert kind == ("kept" if one_dimensional or named else "decayed"), name
    assert sum("local_experts.9." in name for name in names) == 4


def test_a_tied_embedding_is_one_parameter_over_stages(tmp_path: Path) -> None:
    """The last stage holds a copy of it as its head. A pattern that means one of the two alone would hang the step,
    whose stages add up the gradients of both, or decay the copies apart."""
    hf = toy.hf_dir(tmp_path / "hf", tiny_dense(tie_word_embeddings=True, num_hidden_layers=2, torch_dtype="float32"))
    for rank in run_ranks(_tied, 2, hf, free_port(), keep=True):
        assert rank == {"frozen": [], "kept": True, "no_decay": [0.0]}


def test_patterns_that_cannot_be_meant_are_refused(found: Found) -> None:
    """On every rank and naming the pattern: a pipeline stage alone cannot tell that a pattern matches nowhere."""
    for rank in found["both"]:
        check_refusal(rank["typo"], "optimizer.frozen", "'decoder.layers.7.*'")
        check_refusal(rank["all"], "optimizer.frozen")
        check_refusal(rank["one expert"], "optimizer.frozen", 1, 16)
        check_refusal(rank["decay typo"], "optimizer.no_decay", "'*.bais'")
