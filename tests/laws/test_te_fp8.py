"""FP8 training through TransformerEngine's modules: its recipes round what they say, and what that does to log-probs.

The package's own modules and quantizers run over an emulated extension (tests/support/te), whose casts are those of
`quant/` (tests/test_te_emulation.py). Not covered: products of codes on a device, whose sums are not FP32 throughout;
parameters kept in FP8.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.laws.test_qat import MODELS
from tests.support import toy
from tests.support.layouts import EXPERTS
from tests.support.spawn import free_port, run_ranks

HERE = "tests/laws/test_te_fp8.py"
DEVICES = {"HOPPER": ("tensorwise", "blockwise", "delayed"), "BLACKWELL": ("mxfp8",)}  # a process each
RECIPES = {recipe: device for device, recipes in DEVICES.items() for recipe in recipes}
KERNELS: dict[str, Any] = {"spec": "te", "grouped_gemm": True}
STEPS = 3


def _one(where: Path, hf: str, recipe: str) -> dict[str, Any]:
    """Log-probs before and after some steps, of weights that the BF16 run has at the start too; casts by function."""
    import sys

    called: dict[str, int] = sys.modules["transformer_engine_torch"].called  # type: ignore[attr-defined]
    called.clear()
    kernels = KERNELS if recipe == "none" else KERNELS | {"fp8": recipe}
    with toy.trainer(toy.config(hf, dtype="bfloat16", kernels=kernels), 0, 1, free_port()) as t:
        if recipe == "none":
            toy.scramble(t)
            t.save(where / "start")
        t.load_weights(where / "start")
        layers = t.family.moe_layers(t.hf)
        row, _ = toy.grid(toy.samples(8, seed=9, layers=layers, experts=EXPERTS), dp=1, micros=2)
        start, loss = torch.cat(t.logprobs(row[0])), []
        for step in range(STEPS):
            rows, tokens = toy.grid(toy.samples(8, seed=step, layers=layers, experts=EXPERTS), dp=1, micros=2)
            loss.append(dict(t.step(rows[0], tokens, step + 1).metrics)["train/grad_norm"])
        masks = torch.cat([m.loss_mask for m in row[0]])
        return {"start": start[masks].numpy(), "norms": loss, "called": dict(called)}


def _all(rank: int, world: int, port: int, where: Path) -> dict[str, Any]:
    """The recipes of one device, and no recipe."""
    from tests.support.te import process

    device, recipes = list(DEVICES.items())[rank]
    process.init_te(getattr(process, device))
    own = where / device
    hf = toy.hf_dir(own / "hf", MODELS["wide"])
    return {recipe: _one(own, hf, recipe) for recipe in ("none", *recipes)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Recipe -> what it found, and what the same process did without one."""
    where = tmp_path_factory.mktemp("fp8")
    ranks = dict(zip(DEVICES, run_ranks(_all, len(DEVICES), where, timeout_s=900.0, cold=True), strict=True))
    return {
        recipe: {"with": ranks[device][recipe], "without": ranks[device]["none"]} for recipe, device in RECIPES.items()
    }


def k3(gap: torch.Tensor) -> float:
    """Mean of exp(x) - x - 1, an estimate of the KL divergence in nats."""
    return float((gap.exp() - gap - 1).mean())


@pytest.mark.long(beside="tests/laws/test_te_modules.py")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_moves_log_probs_by_its_rounding(found: dict[str, Any], recipe: str) -> None:
    """Every linear's operands are rounded to three bits of mantissa: log-probs move, by far less than they are, and the
    first step's gradient keeps its size."""
    plain, mine = (torch.from_numpy(found[recipe][kind]["start"]) for kind in ("without", "with"))
    gap, norms = mine - plain, [found[recipe][kind]["norms"][0] for kind in ("without", "with")]
    print(f"{recipe}: mean |gap| {gap.abs().mean():.4f}, k3 {k3(gap):.2e}, gradient norms {norms}")
    assert 1e-4 < float(gap.abs().mean()) < 0.2 and math.isfinite(k3(gap))
    assert norms[1] == pytest.approx(norms[0], rel=0.2)


@pytest.mark.long(beside="tests/laws/test_te_modules.py")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_casts_every_operand_and_bf16_none(found: dict[str, Any], recipe: str) -> None:
    casts = {"quantize", "split_quantize"}
    assert not casts & found[recipe]["without"]["called"].keys()
    called = found[recipe]["with"]["called"]
    # a weight, an input and a gradient of each product of forward and backward, fewer where one is used twice
    assert called["quantize"] > called["generic_gemm"] / 2 and called["split_quantize"], called
