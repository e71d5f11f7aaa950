"""Linears of TransformerEngine under an FP8 recipe beside the same products of what the codecs of `quant/` decode.

For a process that has the package: its own extension on a device, or the emulated one (tests/support/te).
Letters: n rows, k columns of an operand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec

ROWS, IN, OUT, GROUPS = 256, 384, 256, 2
Distances = dict[str, tuple[float, float]]  # what -> from the codecs' products, from those that are not rounded


def _by_codec(x: Tensor, format: QuantFormat, block: tuple[int, int]) -> Tensor:
    return make_codec(QuantSpec(format=format, block=block)).fake({"x": x.contiguous()})["x"].float()


def _rounded(x: Tensor, recipe: str, *, along_rows: bool, weight: bool = False) -> Tensor:
    """An operand [n, k] as `quant/` rounds it, for a product that sums over its rows' elements or over its rows."""
    if recipe in ("tensorwise", "delayed"):
        return _by_codec(x, QuantFormat.FP8, tuple(x.shape))  # type: ignore[arg-type]
    if recipe == "blockwise" and weight:
        return _by_codec(x, QuantFormat.FP8_UE8M0, (128, 128))
    how = (QuantFormat.FP8_UE8M0, (1, 128)) if recipe == "blockwise" else (QuantFormat.MXFP8, (1, 32))
    return _by_codec(x, *how) if along_rows else _by_codec(x.t(), *how).t()


def _distance(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


def both(recipe: str, device: torch.device) -> dict[str, Distances]:
    """Of a linear and of grouped ones; recipe: a value of `kernels.fp8`."""
    return {"linear": _products(recipe, device, grouped=False), "grouped": _products(recipe, device, grouped=True)}


def _products(recipe: str, device: torch.device, *, grouped: bool) -> Distances:
    """Of the output and both gradients. With "delayed" those of the third step, when all factors are those of these
    operands."""
    import transformer_engine.pytorch as te
    from megatron.core.fp8_utils import get_fp8_recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    how: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": device}
    module = te.GroupedLinear(GROUPS, IN, OUT, **how) if grouped else te.Linear(IN, OUT, **how)
    config = TransformerConfig(
        num_layers=1, hidden_size=IN, num_attention_heads=1, bf16=True, fp8="e4m3", fp8_recipe=recipe
    )
    g = torch.Generator().manual_seed(3)
    count, each = (GROUPS, ROWS // GROUPS) if grouped else (1, ROWS)
    # columns and rows of very different sizes, which a scale of the whole tensor treats alike
    x = (torch.randn(ROWS, IN, generator=g) * torch.logspace(-2, 1, IN)).bfloat16().to(device).requires_grad_()
    grad = (torch.randn(ROWS, OUT, generator=g) * torch.logspace(-1, 1, ROWS)[:, None]).bfloat16().to(device)
    weights = list(module.parameters())
    with torch.no_grad():
        for w in weights:
            w.copy_(torch.randn(OUT, IN, generator=g) * 0.05)
    for _ in range(3):
        x.grad = None
        for w in weights:
            w.grad = None
        with te.fp8_autocast(enabled=True, fp8_recipe=get_fp8_recipe(config)):
            y = module(x, [each] * count) if grouped else module(x)
        y.backward(grad)
    assert x.grad is not None
    found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"output": [], "of input": [], "of weight": []}
    parts = zip(weights, *(t.detach().cpu().split(each) for t in (x, grad, y, x.grad)), strict=True)
    for w, own_x, own_grad, own_y, own_dx in parts:
        assert w.grad is not None
        w_grad, own_w = w.grad.cpu(), w.detach().cpu()
        wide, wide_grad, matrix = own_x.float(), own_grad.float(), own_w.float()
        of_w = _rounded(own_w, recipe, along_rows=True, weight=recipe != "mxfp8")
        of_w_down = of_w if recipe != "mxfp8" else _rounded(own_w, recipe, along_rows=False)
        by_rows = [_rounded(t, recipe, along_rows=True) for t in (own_x, own_grad)]
        down = [_rounded(t, recipe, along_rows=False) for t in (own_x, own_grad)]
        found["output"].append((own_y, by_rows[0] @ of_w.t(), wide @ matrix.t()))
        found["of input"].append((own_dx, by_rows[1] @ of_w_down, wide_grad @ matrix))
        found["of weight"].append((w_grad, down[1].t() @ down[0], wide_grad.t() @ wide))
    out = {}
    for name, triples in found.items():
        got, want, exact = (torch.cat([t[i].float() for t in triples]) for i in range(3))
        out[name] = (_distance(got, want), _distance(got, exact))
    return out
