"""Law: activations that are computed again give the gradients of those that were kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.recompute import recompute_settings, routes_again
from megatron_bridge.plan.resolve import resolve
from tests.support import toy
from tests.support.layouts import EXPERTS, ROUTED
from tests.support.refusals import refuses
from tests.support.spawn import free_port, run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": {"recompute": "full"},
    "selective": {"recompute": "selective"},
    **{
        name: {"recompute": "selective", "recompute_modules": (name,)}
        for name in ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
    },
    "all": {
        "recompute": "selective",
        "recompute_modules": ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
    },
}
ROUTED_AGAIN = ("full", "selective", "moe", "all")


def _run(t: Any, row: list[Any], tokens: int) -> dict[str, Any]:
    """A step that is not applied: its loss, gradients, and how often each (micro-batch, layer) was routed, and how many
    elements autograd kept from forward to backward."""
    asked: dict[tuple[int, int], int] = {}
    kept = 0
    replay = t._step.replay
    stock = replay.route

    def route(layer: int, scores: Any, native: Any) -> Any:
        asked[replay._micro, layer] = asked.get((replay._micro, layer), 0) + 1
        return stock(layer, scores, native)

    def keep(x: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += 0 if replay._in_backward else x.numel()
        return x

    replay.route = route
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        metrics = t._step.run(row, tokens)
    grads = {n: p.main_grad.clone() for n, p in t.models[0].named_parameters()}
    return {"loss": metrics["train/loss"], "grads": grads, "asked": sorted(set(asked.values())), "kept": kept}


def _ranks(rank: int, world: int, port: int, hf: str, start: Path, ports: list[int], layout: dict[str, int]) -> Any:
    out, want = {}, None
    for name, more in KINDS.items():
        with toy.trainer(toy.config(hf, **layout, **more), rank, world, ports.pop()) as t:
            if name == "none":
                toy.scramble(t)
                t.save(start)
            t.load_weights(start)
            rows, tokens = toy.grid(toy.samples(12, experts=EXPERTS), dp=1, micros=3)
            got = _run(t, rows[0], tokens)
            want = want or got
            gaps = [float((g - want["grads"][n]).norm() / want["grads"][n].norm()) for n, g in got["grads"].items()]
            out[name] = {"loss": got["loss"], "gap": max(gaps), "asked": got["asked"], "kept": got["kept"]}
    return out


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one rank"),
        pytest.param({"tp": 2}, id="TP2", marks=pytest.mark.long(beside="tests/laws/test_recompute.py")),
    ],
)
def test_gradients_do_not_depend_on_what_is_recomputed(tmp_path: Path, layout: dict[str, int]) -> None:
    """The same operations on the same numbers run again, so loss and every parameter's gradient are equal bit for bit
    (with norms only to rounding: megatron then adds a residual's two gradients in another order); a router inside what
    is recomputed is asked exactly once more (the step fails otherwise), any other is not; and fewer numbers are kept.
    Three micro-batches of packed samples with replayed routes. Not covered: memory itself, and dropout, of which there
    is none."""
    world = layout.get("tp", 1)
    ports = [free_port() for _ in KINDS]
    hf = toy.hf_dir(tmp_path / "hf", toy.hf_config() | ROUTED)
    found = run_ranks(_ranks, world, hf, tmp_path / "start", ports, layout, keep=True)
    for rank in found:
        for name, got in rank.items():
            assert got["loss"] == rank["none"]["loss"] and got["gap"] <= (
                1e-6 if name in ("layernorm", "all") else 0.0
            ), name
            assert got["asked"] == [2 if name in ROUTED_AGAIN else 1], name
            assert got["kept"] < rank["none"]["kept"] or name in ("none", "layernorm", "mla_up_proj"), name


def _transformer(**changes: Any) -> dict[str, Any]:
    hf = toy.hf_config()
    return {**family_of(hf).transformer_config(hf), **changes}


def test_a_module_that_the_model_lacks_is_refused() -> None:
    """Silently not recomputing a module leads to out-of-memory later; the message lists the modules that fit."""
    dense = _transformer(num_moe_experts=None, multi_latent_attention=False)
    for transformer, name, fitting in [
        (_transformer(), "moe_act", "'core_attn', 'layernorm', 'mla_up_proj', 'mlp', 'moe', 'shared_experts'"),
        (_transformer(), "attention", "'core_attn'"),
        (_transformer(moe_layer_freq=[1, 1, 1]), "mlp", "'mla_up_proj', 'moe', 'shared_experts'"),
        (_transformer(moe_shared_expert_intermediate_size=None), "shared_experts", "'mlp', 'moe']"),
        (dense, "moe", "'core_attn', 'layernorm', 'mlp']"),
    ]:
        config = toy.config("", recompute="selective", recompute_modules=("core_attn", name))
        with refuses(ValueError, f"'{name}'", fitting):
            recompute_settings(config, transformer)
    chosen = recompute_settings(toy.config("", recompute="selective"), dense)
    assert chosen["recompute_modules"] == ["core_attn"] and not routes_again(chosen)


def test_modules_without_selective_are_refused() -> None:
    with refuses(ValueError, "['moe']", "recompute", "full"):
        toy.config("", recompute="full", recompute_modules=("moe",))


def test_selective_takes_what_pays() -> None:
    resolved = resolve(toy.config("", recompute="selective"), toy.hf_config(), cuda=False)
    assert resolved.transformer["recompute_modules"] == ["core_attn", "mla_up_proj", "moe"]
