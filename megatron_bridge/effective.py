"""A linear that computes with a function of its weight, and the promise that this very tensor is what is published."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Effective = Callable[[Tensor], Tensor]  # weight [out, in] -> the weight computed with, same shape and dtype


def use_effective_weight(linear: Any, effective: Effective) -> None:
    """`linear` (Megatron's column- and row-parallel linears, DuplicatedLinear) computes with `effective(weight)`.

    Called once a forward, and again where a layer is recomputed, so `effective` must be deterministic; gradients flow
    through it. A second call composes: the later function is applied to the earlier one's result. The parameter stays
    what it was for the optimizer and for checkpoints, and gets `served`, a function without arguments that returns what
    the linear computes with now, without gradient: the exporter publishes that.
    """
    composed = getattr(linear, "effective_weights", None)
    if composed is not None:
        composed.append(effective)
        return
    # a fused kernel would add the gradient to the parameter's buffer itself, past `effective`
    assert not getattr(linear, "gradient_accumulation_fusion", False), "gradient_accumulation_fusion must be off"
    parameter, stock = linear.weight, linear.forward
    linear.effective_weights = [effective]

    def forward(*args: Any, **kwargs: Any) -> Any:
        linear._parameters["weight"] = weight_of(linear)
        try:
            return stock(*args, **kwargs)
        finally:
            linear._parameters["weight"] = parameter

    linear.forward = forward
    parameter.served = torch.no_grad()(partial(weight_of, linear))


def weight_of(linear: Any) -> Tensor:
    """The weight that `linear` computes with now, for who multiplies by it in its place."""
    value: Tensor = linear.weight
    for function in getattr(linear, "effective_weights", ()):
        value = function(value)
    return value
