"""FP8 training through TransformerEngine's modules: each recipe multiplies what the codecs of `quant/` decode, and
moves log-probs by its rounding alone.

The package's own modules and quantizers run over an emulated extension (tests/support/te), with the recipes that
megatron makes of `kernels.fp8`. Not covered: products of codes on a device, whose sums are not FP32 throughout;
parameters kept in FP8; e5m2.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import fp8_products, toy
from tests.support.layouts import EXPERTS
from tests.support.qat_cases import MODELS
from tests.support.spawn import free_port, run_ranks

HERE = "tests/laws/test_te_fp8.py"
LONG = pytest.mark.long(beside="tests/laws/test_te_modules.py")
DEVICES = {"HOPPER": ("tensorwise", "blockwise", "delayed"), "BLACKWELL": ("mxfp8",)}  # a process each
RECIPES = {recipe: device for device, recipes in DEVICES.items() for recipe in recipes}
KERNELS: dict[str, Any] = {"spec": "te", "grouped_gemm": True}
TRAINED = 30  # steps before the comparison, so that the model knows something
Found = dict[str, Any]


# ---- a model


def _row(t: Any, seed: int) -> tuple[Any, int]:
    layers = t.family.moe_layers(t.hf)
    parts = toy.samples(8, seed=seed, layers=layers, experts=EXPERTS, learnable=True)
    rows, tokens = toy.grid(parts, dp=1, micros=2)
    return rows[0], tokens


def _held(t: Any) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in t.models[0].state_dict().items() if isinstance(x, Tensor)}


def _trained(hf: str) -> dict[str, Tensor]:
    """Weights after steps without a recipe: each token is a function of the last."""
    config = toy.config(hf, dtype="bfloat16", kernels=KERNELS, lr=5e-3)
    with toy.trainer(config, 0, 1, free_port(), toy.NegativeLogLikelihood()) as t:
        toy.scramble(t)
        for step in range(TRAINED):
            t.step(*_row(t, step), step + 1)
        return _held(t)


def _one(hf: str, recipe: str, held: dict[str, Tensor]) -> Found:
    """Log-probs by these weights, the norm of a step's gradient, casts by function."""
    import sys

    called: dict[str, int] = sys.modules["transformer_engine_torch"].called
    called.clear()
    kernels = KERNELS if recipe == "none" else KERNELS | {"fp8": recipe}
    with toy.trainer(toy.config(hf, dtype="bfloat16", kernels=kernels), 0, 1, free_port()) as t:
        with torch.no_grad():
            for name, x in t.models[0].state_dict().items():
                if isinstance(x, Tensor) and name in held and not name.endswith("_extra_state"):
                    x.copy_(held[name])
        t.optimizer.reload_model_params()
        row, tokens = _row(t, 99)
        t.optimizer.zero_grad()
        t._step.run(row, tokens)  # delayed scaling has factors of 1 before it has seen a tensor and a gradient
        scores = torch.cat(t.logprobs(row))
        norm = dict(t.step(row, tokens, 1).metrics)["train/grad_norm"]
        masks = torch.cat([m.loss_mask for m in row])
        return {"start": scores[masks].numpy(), "norm": norm, "called": dict(called)}


def _all(rank: int, world: int, port: int, where: Path) -> Found:
    """The recipes of one device, and no recipe."""
    from tests.support.te import process

    device, recipes = list(DEVICES.items())[rank]
    process.init_te(getattr(process, device))
    hf = toy.hf_dir(where / device / "hf", MODELS["wide"] | {"qk_rope_head_dim": 32})
    linears = {r: fp8_products.both(r, torch.device("cpu")) for r in recipes}
    held = _trained(hf)
    return {"linears": linears, "models": {recipe: _one(hf, recipe, held) for recipe in ("none", *recipes)}}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Recipe -> what it found, and what the same process did without one."""
    where = tmp_path_factory.mktemp("fp8")
    ranks = dict(zip(DEVICES, run_ranks(_all, len(DEVICES), where, timeout_s=900.0, cold=True), strict=True))
    return {
        recipe: {
            "products": ranks[device]["linears"][recipe],
            "with": ranks[device]["models"][recipe],
            "without": ranks[device]["models"]["none"],
        }
        for recipe, device in RECIPES.items()
    }


def k3(gap: Tensor) -> float:
    """Mean of exp(x) - x - 1, an estimate of the KL divergence in nats."""
    return float((gap.exp() - gap - 1).mean())


@LONG
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_multiplies_what_the_codecs_decode(found: Found, recipe: str) -> None:
    """Output and both gradients, of a linear and of grouped ones. Where scales are powers of two, within BF16's
    rounding of the result (seen 0.0017); else a value halfway between two codes may fall to either (seen 0.0091). The
    rounding to FP8 itself is 0.037."""
    bound = 2**-9 if recipe in ("blockwise", "mxfp8") else 2**-6
    for kind, products in found[recipe]["products"].items():
        for what, (apart, rounding) in products.items():
            assert apart < bound, (kind, what, apart)
            assert 0.03 < rounding < 0.05, (kind, what, rounding)


@LONG
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_moves_log_probs_by_its_rounding(found: Found, recipe: str) -> None:
    """Every linear's operands are rounded to three bits of mantissa: log-probs move, by far less than they are, and a
    step's gradient keeps its size. With "delayed" factors are those of the micro-batch before, and what is larger
    saturates: of samples as unlike as these the norm is 0.69 of BF16's."""
    plain, mine = (torch.from_numpy(found[recipe][kind]["start"]) for kind in ("without", "with"))
    gap, norms = mine - plain, [found[recipe][kind]["norm"] for kind in ("without", "with")]
    row: Found = {
        "recipe": recipe,
        "mean log-prob": float(plain.mean()),
        "mean gap": float(gap.abs().mean()),
        "largest gap": float(gap.abs().max()),
        "k3": k3(gap),
        "gradient norms": norms,
    }
    print("\n" + json.dumps(row))
    assert 1e-4 < row["mean gap"] < 0.2 and math.isfinite(k3(gap))
    assert norms[1] == pytest.approx(norms[0], rel=0.4 if recipe == "delayed" else 0.2)


@LONG
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_casts_every_operand_and_bf16_none(found: Found, recipe: str) -> None:
    casts = {"quantize", "split_quantize"}
    assert not casts & found[recipe]["without"]["called"].keys()
    called = found[recipe]["with"]["called"]
    # a weight, an input and a gradient of each product of forward and backward, fewer where one is used twice
    assert called["quantize"] > called["generic_gemm"] / 2 and called["split_quantize"], called
