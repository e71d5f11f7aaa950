"""All of a rank's experts in three operations over their concatenated tokens, for devices without a grouped kernel.

Letters: T tokens of all local experts, E local experts, H hidden size, F an expert's inner size on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron_bridge.model.kernels import grouped_product
from megatron_bridge.model.kernels.chosen import by_triton, note
from megatron_bridge.model.weight_functions import input_of, weight_of

_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class GroupedLinear(torch.autograd.Function):
    """Runs of `sizes` rows of x [T, in], run i times the transpose of weight i [out, in] -> [T, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(x, *weights)
        out = x.new_empty(len(x), len(weights[0]))
        for rows, into, weight in zip(x.split(sizes), out.split(sizes), weights, strict=True):
            torch.mm(rows, weight.t(), out=into)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = torch.empty_like(x)
            for rows, into, weight in zip(grad.split(ctx.sizes), of_x.split(ctx.sizes), weights, strict=True):
                torch.mm(rows, weight, out=into)
        of_weights = (
            g.t().mm(rows) if needed else None
            for g, rows, needed in zip(grad.split(ctx.sizes), x.split(ctx.sizes), ctx.needs_input_grad[2:], strict=True)
        )
        return of_x, None, *of_weights


class _Resized(torch.autograd.Function):
    """Concatenated runs of `counts` rows -> runs of `sizes` rows: truncated, or padded with zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: list[int], sizes: list[int]) -> Tensor:
        ctx.lengths = counts, sizes
        out = x.new_empty(sum(sizes), *x.shape[1:])
        for new, old in zip(out.split(sizes), x.split(counts), strict=True):
            kept = min(len(new), len(old))
            new[:kept] = old[:kept]
            new[kept:] = 0
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        counts, sizes = ctx.lengths
        return _Resized.apply(grad, sizes, counts), None, None  # type: ignore[no-untyped-call]


class LocalGroupedMLP(SequentialMLP):
    """Megatron's SequentialMLP, with its parameters and checkpoint format, without a call and a copy per expert.

    Stock experts run one after the other: a dozen small operations each, and their outputs and gradients are then
    concatenated. Here a loop computes the two matrix products into one output, and one operation all activations.

    On a CUDA device each of the two is one grouped product (`kernels/grouped_product.py`).

    On a CPU in bf16 each expert's tokens are padded to a multiple of `ROWS`. Their number changes every step, and
    oneDNN recompiles a bf16 matrix product for every number of rows: half a millisecond, several times the product
    itself at small sizes. Zero rows give zeros (there are no biases) and no gradient. With sixteen rows or more, a
    row's bits also do not depend on the number of rows.

    Hooks on the experts' linears are called; the experts and their activation modules are not.
    """

    ROWS = 64

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        assert c.gated_linear_unit and c.activation_func is F.silu and not c.add_bias_linear
        assert c.activation_func_clamp_value is None and not c.glu_linear_offset and not c.moe_apply_probs_on_input

    def product(self, name: str, x: Tensor, weights: Sequence[Tensor]) -> type[torch.autograd.Function]:
        """The autograd function of the experts' linear `name`, as `GroupedLinear`."""
        fused = note("experts", x, grouped_product.supports(x, weights))
        return grouped_product.GroupedProduct if fused else GroupedLinear

    def fills_up(self, x: Tensor) -> bool:
        """Whether each expert's tokens are padded to a multiple of ROWS."""
        return x.dtype is torch.bfloat16 and not grouped_product.on_device(x)

    def activate(self, h: Tensor, weights: Tensor) -> Tensor:
        """SwiGLU of h [T, 2F] -> [T, F], times weights [T, 1]."""
        if by_triton("activation", h):
            from megatron_bridge.model.kernels.swiglu import WeightedSwiGLU

            return WeightedSwiGLU.apply(h, weights)  # type: ignore[no-any-return, no-untyped-call]
        return weighted_bias_swiglu_impl(h, None, weights)  # type: ignore[no-any-return]

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H]: outputs of the local experts' tokens, grouped by expert, times their weights [T]."""
        x, counts = permuted_local_hidden_states, tokens_per_expert.tolist()
        padded = self.fills_up(x)
        sizes = [n + -n % self.ROWS for n in counts] if padded else counts

        def resized(values: Tensor, old: list[int], new: list[int]) -> Tensor:
            return _Resized.apply(values, old, new) if padded else values  # type: ignore[no-untyped-call]

        h = self._linear("linear_fc1", resized(x, counts, sizes), sizes)
        h = self.activate(h, resized(permuted_probs, counts, sizes)[:, None])
        return resized(self._linear("linear_fc2", h, sizes), sizes, counts), None

    def _linear(self, name: str, x: Tensor, sizes: list[int]) -> Tensor:
        """Linear `name` of every expert. The modules are called one by one when any has a hook that sees what it
        returns or replaces its input, or when only some have an input function."""
        linears = [getattr(expert, name) for expert in self.local_experts]
        runs = x.split(sizes)
        mixed = len({hasattr(linear, "input_function") for linear in linears}) > 1
        if mixed or any(getattr(linear, kind) for linear in linears for kind in _HOOKS) or _replaced(linears, runs):
            return torch.cat([linear(rows)[0] for linear, rows in zip(linears, runs, strict=True)])
        x, weights = input_of(linears[0], x), [weight_of(linear) for linear in linears]
        out: Tensor = self.product(name, x, weights).apply(x, sizes, *weights)
        return out


def _replaced(linears: Sequence[torch.nn.Module], runs: Sequence[Tensor]) -> bool:
    """Calls all forward pre-hooks, such as the wait for overlap_param_gather; whether one gives another input."""
    hooks = [
        hook(linear, (rows,))
        for linear, rows in zip(linears, runs, strict=True)
        for hook in linear._forward_pre_hooks.values()
    ]
    return any(value is not None for value in hooks)
