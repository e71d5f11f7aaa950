"""A linear that computes with a function of its weight, or of its input, and what of it is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

Effective = Callable[[Tensor], Tensor]  # weight [out, in] -> the weight computed with, same shape and dtype


@dataclass(frozen=True, slots=True)
class _Functions:
    published: list[Effective] = field(default_factory=list)
    private: list[Effective] = field(default_factory=list)


def use_effective_weight(linear: Any, effective: Effective, *, published: bool = True, name: str = "weight") -> None:
    """`linear` computes with `effective(weight)`: one of Megatron's column- and row-parallel linears, DuplicatedLinear,
    or TransformerEngine's, whose grouped linear has a parameter `name` for each expert.

    Called once a forward, and again where a layer is recomputed, so `effective` must be deterministic; gradients flow
    through it. A second call composes: the later function is applied to the earlier one's result. The parameter stays
    what it was for the optimizer and for checkpoints, and gets two functions without arguments, which give no gradient:
    `computed`, what the linear computes with now, and `served`, the same without the functions that are not `published`
    because publication does their work itself: they come last.
    """
    if not hasattr(linear, "effective_weights"):
        _wrap(linear)
    functions = linear.effective_weights.get(name)
    if functions is None:
        functions = linear.effective_weights[name] = _Functions()
        parameter = linear._parameters[name]
        parameter.served = partial(_without_gradient, published_weight_of, linear, name)
        parameter.computed = partial(_without_gradient, weight_of, linear, name)
    assert not (published and functions.private), "a published function of a weight comes before those that are not"
    (functions.published if published else functions.private).append(effective)


def _wrap(linear: Any) -> None:
    # a fused kernel would add the gradient to the parameter's buffer itself, past `effective`
    for flag in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
        assert not getattr(linear, flag, False), f"{flag} must be off"
    stock = linear.forward
    linear.effective_weights = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: linear._parameters[name] for name in linear.effective_weights}
        linear._parameters.update({name: weight_of(linear, name) for name in parameters})
        try:
            return stock(*args, **kwargs)
        finally:
            linear._parameters.update(parameters)

    linear.forward = forward


def _without_gradient(weight: Callable[[Any, str], Tensor], linear: Any, name: str) -> Tensor:
    with torch.no_grad():
        return weight(linear, name).detach()


def published_weight_of(linear: Any, name: str = "weight") -> Tensor:
    """The weight of `linear` that is handed to publication."""
    value: Tensor = getattr(linear, name)
    functions = getattr(linear, "effective_weights", {}).get(name)
    for function in functions.published if functions is not None else ():
        value = function(value)
    return value


def weight_of(linear: Any, name: str = "weight") -> Tensor:
    """The weight that `linear` computes with now, for who multiplies by it in its place."""
    value = published_weight_of(linear, name)
    functions = getattr(linear, "effective_weights", {}).get(name)
    for function in functions.private if functions is not None else ():
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
