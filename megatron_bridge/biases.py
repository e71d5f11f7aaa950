"""Biases that published models have and megatron-core 0.16.1 builds only together with biases in every MLP.

`add_bias_linear` is one switch for attention's output projection and for all MLPs, and MLA's down projections never
have a bias. The linears themselves can all hold one, so it is put there after the model is built.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import RowParallelLinear
from torch.nn import Parameter

from megatron_bridge.local_modules import DuplicatedLinear


def add_biases(model: torch.nn.Module, names: Iterable[str]) -> None:
    """A bias of zeros for every linear whose name ends with one of `names` and that has none. Every tensor-parallel
    rank holds it whole; under sequence parallelism its gradient is added up over them. Before gradient buffers are
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
