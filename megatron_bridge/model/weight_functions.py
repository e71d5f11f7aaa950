"""Linears that compute with a function of their weight or of their input, and the weight that they publish."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

WeightFunction = Callable[[Tensor], Tensor]  # weight [out, in] -> the weight computed with, same shape and dtype


@dataclass(frozen=True, slots=True)
class _Functions:
    published: list[WeightFunction] = field(default_factory=list)
    private: list[WeightFunction] = field(default_factory=list)


def use_weight_function(linear: Any, function: WeightFunction, *, published: bool = True, name: str = "weight") -> None:
    """Make `linear` compute with `function(weight)`. It is one of Megatron's column- and row-parallel linears,
    DuplicatedLinear, or TransformerEngine's, whose grouped linear has a parameter `name` per expert.

    `function` is called once per forward, and again when a layer is recomputed, so it must be deterministic; gradients
    flow through it. A second call composes: the later function is applied to the earlier one's result. The parameter is
    unchanged for the optimizer and for checkpoints. The parameter gets two methods that give no gradient: `computed()`,
    the weight that the linear computes with, and `served()`, the weight after the `published` functions only. Functions
    that are not `published` are applied last: the publisher makes the same change (such as quantization) itself.
    """
    if not hasattr(linear, "weight_functions"):
        _wrap(linear)
    functions = linear.weight_functions.get(name)
    if functions is None:
        functions = linear.weight_functions[name] = _Functions()
        parameter = linear._parameters[name]
        parameter.served = partial(_without_gradient, published_weight_of, linear, name)
        parameter.computed = partial(_without_gradient, weight_of, linear, name)
    assert not (published and functions.private), "a published function of a weight comes before those that are not"
    (functions.published if published else functions.private).append(function)


def _wrap(linear: Any) -> None:
    # a fused kernel would add the gradient to the parameter's buffer itself, bypassing the function
    for flag in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
        assert not getattr(linear, flag, False), f"{flag} must be off"
    stock = linear.forward
    linear.weight_functions = {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        parameters = {name: linear._parameters[name] for name in linear.weight_functions}
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
    """The weight of `linear` that is published."""
    value: Tensor = getattr(linear, name)
    functions = getattr(linear, "weight_functions", {}).get(name)
    for function in functions.published if functions is not None else ():
        value = function(value)
    return value


def weight_of(linear: Any, name: str = "weight") -> Tensor:
    """The weight that `linear` computes with, for code that multiplies by it without calling the module."""
    value = published_weight_of(linear, name)
    functions = getattr(linear, "weight_functions", {}).get(name)
    for function in functions.private if functions is not None else ():
        value = function(value)
    return value


def use_input_function(linear: Any, function: WeightFunction) -> None:
    """Make `linear` compute with `function(x)` of its input; code that does not call the module uses `input_of`."""
    assert not hasattr(linear, "input_function"), "one function of a linear's input"
    stock, linear.input_function = linear.forward, function

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return stock(function(x), *args, **kwargs)

    linear.forward = forward


def input_of(linear: Any, x: Tensor) -> Tensor:
    """The tensor that `linear` multiplies with its weight when called with x."""
    function: WeightFunction | None = getattr(linear, "input_function", None)
    return x if function is None else function(x)
