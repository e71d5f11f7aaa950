"""All of a rank's experts in three operations over their tokens laid end to end, where no grouped kernel is at hand.

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

from megatron_bridge.effective import input_of, weight_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class GroupedLinear(torch.autograd.Function):
    """Runs of `sizes` rows of x [T, in], each times the transpose of its own weight [out, in] -> [T, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(x, *weights)
        out = x.new_empty(len(x), len(weights[0]))
        for rows, into, weight in zip(x.split(sizes), out.split(sizes), weights, strict=True):
            torch.mm(rows, weight.t(), out=into)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
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
    """Runs of `counts` rows, end to end -> runs of `sizes`: cut off, or filled up with zeros."""

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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        counts, sizes = ctx.lengths
        return _Resized.apply(grad, sizes, counts), None, None


class LocalGroupedMLP(SequentialMLP):
    """Megatron's SequentialMLP, whose parameters and checkpoint it keeps, without a call and a copy for each expert.

    Stock experts run one after the other: a dozen small operations each, and their outputs and gradients are copied
    together. Here a loop does the two matrix products, written in place, and one operation the activation of all.

    In bf16 each expert gets a multiple of `ROWS` tokens. How many it is given changes every step, and oneDNN compiles
    a bf16 matrix product anew for every number of rows: half a millisecond, several times the product itself at small
    sizes. Rows of zeros give zeros (there are no biases) and no gradient. Sixteen rows or more also keep a row's bits
    independent of how many there are.

    The experts' linears can be watched by hooks; an expert itself, and its activation, are not called.
    """

    ROWS = 64

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        assert c.gated_linear_unit and c.activation_func is F.silu and not c.add_bias_linear
        assert c.activation_func_clamp_value is None and not c.glu_linear_offset and not c.moe_apply_probs_on_input

    def product(self, name: str) -> type[GroupedLinear]:
        """What computes the experts' linear `name`."""
        return GroupedLinear

    def fills_up(self, dtype: torch.dtype) -> bool:
        """Whether experts are given a multiple of ROWS tokens."""
        return dtype is torch.bfloat16

    def activate(self, h: Tensor, weights: Tensor) -> Tensor:
        """h [T, 2F] -> [T, F], times weights [T, 1]."""
        return weighted_bias_swiglu_impl(h, None, weights)  # type: ignore[no-any-return]

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """[T, H] of the local experts' tokens, each expert's together, times their weights [T]."""
        x, counts = permuted_local_hidden_states, tokens_per_expert.tolist()
        padded = self.fills_up(x.dtype)
        sizes = [n + -n % self.ROWS for n in counts] if padded else counts

        def resized(values: Tensor, old: list[int], new: list[int]) -> Tensor:
            return _Resized.apply(values, old, new) if padded else values  # type: ignore[no-any-return]

        h = self._linear("linear_fc1", resized(x, counts, sizes), sizes)
        h = self.activate(h, resized(permuted_probs, counts, sizes)[:, None])
        return resized(self._linear("linear_fc2", h, sizes), sizes, counts), None

    def _linear(self, name: str, x: Tensor, sizes: list[int]) -> Tensor:
        """That linear of every expert. One with hooks is called as a module: it is being watched, or its weights are
        still being gathered (overlap_param_gather) and its hook waits for them. So are all where only
        some compute with a function of their input."""
        linears = [getattr(expert, name) for expert in self.local_experts]
        mixed = len({hasattr(linear, "effective_input") for linear in linears}) > 1
        if mixed or any(getattr(linear, kind) for linear in linears for kind in _HOOKS):
            return torch.cat([linear(rows)[0] for linear, rows in zip(linears, x.split(sizes), strict=True)])
        product = self.product(name)
        return product.apply(input_of(linears[0], x), sizes, *map(weight_of, linears))  # type: ignore[no-any-return]
