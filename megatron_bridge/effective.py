"""A linear that computes with a function of its weight, or of its input, and what of it is published."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Effective = Callable[[Tensor], Tensor]  # weight [out, in] -> the weight computed with, same shape and dtype


def use_effective_weight(linear: Any, effective: Effective, *, published: bool = True) -> None:
    """`linear` (Megatron's column- and row-parallel linears, DuplicatedLinear) computes with `effective(weight)`.

    Called once a forward, and again where a layer is recomputed, so `effective` must be deterministic; gradients flow
    through it. A second call composes: the later function is applied to the earlier one's result. The parameter stays
    what it was for the optimizer and for checkpoints, and gets two functions without arguments, which give no gradient:
    `computed`, what the linear computes with now, and `served`, the same without the functions that are not `published`
    because publication does their work itself: they come last.
    """
    private: list[Effective] | None = getattr(linear, "private_weights", None)
    if private is None:
        private = _wrap(linear)
    assert not (published and private), "a published function of a weight comes before those that are not"
    (linear.effective_weights if published else private).append(effective)


def _wrap(linear: Any) -> list[Effective]:
    # a fused kernel would add the gradient to the parameter's buffer itself, past `effective`
    assert not getattr(linear, "gradient_accumulation_fusion", False), "gradient_accumulation_fusion must be off"
    parameter, stock = linear.weight, linear.forward
    private: list[Effective] = []
    linear.effective_weights, linear.private_weights = [], private

    def forward(*args: Any, **kwargs: Any) -> Any:
        linear._parameters["weight"] = weight_of(linear)
        try:
            return stock(*args, **kwargs)
        finally:
            linear._parameters["weight"] = parameter

    linear.forward = forward
    parameter.served = partial(_without_gradient, published_weight_of, linear)
    parameter.computed = partial(_without_gradient, weight_of, linear)
    return private


def _without_gradient(weight: Effective, linear: Any) -> Tensor:
    with torch.no_grad():
        return weight(linear).detach()


def published_weight_of(linear: Any) -> Tensor:
    """The weight of `linear` that is handed to publication."""
    value: Tensor = linear.weight
    for function in getattr(linear, "effective_weights", ()):
        value = function(value)
    return value


def weight_of(linear: Any) -> Tensor:
    """The weight that `linear` computes with now, for who multiplies by it in its place."""
    value = published_weight_of(linear)
    for function in getattr(linear, "private_weights", ()):
        value = function(value)
    return value


def use_effective_input(linear: Any, effective: Effective) -> None:
    """`linear` computes with `effective(x)` of what it is called with; who multiplies in its place asks `input_of`."""
    assert not hasattr(linear, "effective_input"), "one function of a linear's input"
    stock, linear.effective_input = linear.forward, effective

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(effective(x), *args, **kwargs)

    linear.forward = forward


def input_of(linear: Any, x: Tensor) -> Tensor:
    """What `linear` multiplies its weight with when it is given x."""
    effective: Effective | None = getattr(linear, "effective_input", None)
    return x if effective is None else effective(x)
