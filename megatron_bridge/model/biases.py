"""Attention biases that megatron-core 0.16.1 cannot build without also adding a bias to every MLP.

`add_bias_linear` is one switch for attention's output projection and for all MLPs, and MLA's down projections never
have a bias. Every linear can hold a bias, so the missing ones are added after the model is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch.nn import Parameter

from megatron_bridge.model.local_modules import DuplicatedLinear


def add_biases(model: torch.nn.Module, names: Iterable[str]) -> None:
    """Add a zero bias to every linear without one whose name ends with one of `names`. Every tensor-parallel rank holds
    the whole bias; under sequence parallelism its gradient is summed over them. Call it before gradient buffers are
    made."""
    endings = tuple("." + name for name in names)
    for name, linear in model.named_modules():
        if name.endswith(endings) and linear.bias is None:
            assert isinstance(linear, (RowParallelLinear, DuplicatedLinear)), f"{name} is a {type(linear).__name__}"
            weight: Any = linear.weight
            rows = linear.output_size if isinstance(linear, RowParallelLinear) else linear.out_features
            bias: Any = Parameter(weight.new_zeros(rows))
            bias.allreduce = True
            bias.sequence_parallel = linear.sequence_parallel
            linear.bias = bias
