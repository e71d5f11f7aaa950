"""Bytes of a layer whose operations are separate kernels, as PyTorch executes them without a compiler.

Such a layer reads and writes its activations in each operation: norms and the experts' outputs in FP32 between casts,
rotary angles in five passes, gates, permutations and sums one by one. `tests/miles_like/timing/test_separate.py`
executes the operations under a counter of bytes and holds the pairs below to it, but SUM, which is that of one
addition.

A pair is (forward, backward) in bytes a channel of one token. A kernel counts what it reads and what it writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from miles_like.timing.shape import ModelShape


class Moved(NamedTuple):
    """Bytes of a forward and of a backward."""

    forward: float
    backward: float

    def times(self, factor: float) -> Moved:
        return Moved(factor * self.forward, factor * self.backward)

    def plus(self, other: Moved) -> Moved:
        return Moved(self.forward + other.forward, self.backward + other.backward)


# RMSNorm: cast to FP32, square, mean, product, cast back, product with the weight. Its backward sums the gradients of
# both uses of the input in FP32.
NORM = Moved(36, 92)
# Product with the cosine; halves negated and joined; product with the sine; sum.
ROTARY = Moved(20, 30)
# SiLU, and the product of gate and up.
GATE = Moved(10, 18)
# A sum of two tensors, as of a residual.
SUM = Moved(6, 6)
# A row of an expert: gathered, its output cast to FP32, weighed, cast back and added to its token.
ROUTED = Moved(30, 52)
# An adapter beside a matrix, by channel of its input and of its output: the two thin products, the scaling, the sum;
# backward also the thin products for both factors and the sum of the inputs' gradients.
ADAPTER_INPUT = Moved(2, 10)
ADAPTER_OUTPUT = Moved(12, 8)


@dataclass(frozen=True, slots=True)
class Separate:
    """A layer's operations are separate kernels."""

    query_norms: bool = True
    """Whether queries and keys are normed."""
    rotated: float = 1.0
    """Share of the channels of queries and keys with rotary angles."""


def layer_bytes(shape: ModelShape, how: Separate, *, moe: bool, adapters: bool) -> Moved:
    """Of one token in a layer without parallelism inside of it."""
    hidden, turned = shape.hidden, (shape.core + shape.kv_channels) / 2
    gates = shape.top_k * shape.expert_ffn + shape.shared / (3 * hidden) if moe else shape.dense / (3 * hidden)
    parts = [
        NORM.times(2 * hidden + how.query_norms * turned),
        ROTARY.times(how.rotated * turned),
        SUM.times(2 * hidden),
        # what queries, keys and values, and gate and up, return to their common input
        Moved(0, SUM.backward).times(3 * hidden),
        GATE.times(gates),
    ]
    if moe:
        rows = shape.top_k * hidden
        parts += [ROUTED.times(rows), Moved(0, SUM.backward).times(rows - hidden)]
    if adapters:
        inputs, outputs = adapted_channels(shape, moe=moe)
        parts += [ADAPTER_INPUT.times(inputs), ADAPTER_OUTPUT.times(outputs)]
    total = Moved(0, 0)
    for part in parts:
        total = total.plus(part)
    return total


def adapted_channels(shape: ModelShape, *, moe: bool) -> tuple[float, float]:
    """Channels of inputs and of outputs of a layer's matrices with adapters, for one token: all but the router and the
    shared experts."""
    hidden, queries = shape.hidden, shape.core / 2
    ffn = shape.expert_ffn if moe else shape.dense / (3 * hidden)
    rows = shape.top_k if moe else 1
    inputs = 3 * hidden + queries + rows * (2 * hidden + ffn)
    outputs = queries + shape.kv_channels + hidden + rows * (2 * ffn + hidden)
    return inputs, outputs
