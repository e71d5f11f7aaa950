"""Megatron's modules with a forward pass made of the embedded engine's operations (`quant.exact`).

Backward stays megatron's, or plain torch's: only forward passes must produce equal log-probabilities.

Letters: S rows of a sequence-parallel region, T packed tokens, E experts, K of them per token, N outputs, H hidden
size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import megatron.core.transformer.mlp as mlp
import megatron.core.transformer.moe.moe_layer as moe_layer
import megatron.core.transformer.moe.router as router
import megatron.core.transformer.moe.shared_experts as shared_experts
import torch
import torch.distributed as dist
from megatron.core.fusions.fused_bias_swiglu import SwiGLUFunction, WeightedSwiGLUFunction
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    LinearWithGradAccumulationAndAsyncCommunication,
    RowParallelLinear,
    custom_fwd,
)
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_bridge.model.grouped_experts import GroupedLinear, LocalGroupedMLP
from megatron_bridge.model.local_modules import DuplicatedLinear, SDPACoreAttention, padded_causal_attention
from megatron_bridge.model.router import MaskedRouter
from quant.exact import attention, products, routing, rows

# ---- linears


class _Linear(LinearWithGradAccumulationAndAsyncCommunication):
    """The stock function with another matrix product in forward."""

    @staticmethod
    @custom_fwd  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        grad_output_buffer: None,
        wgrad_deferral_limit: None,
        tp_group: ProcessGroup | None,
    ) -> Tensor:
        assert not gradient_accumulation_fusion and grad_output_buffer is None
        ctx.save_for_backward(input, weight)
        ctx.main_grad, ctx.gradient_accumulation_fusion, ctx.use_bias = None, False, bias is not None
        ctx.allreduce_dgrad, ctx.sequence_parallel, ctx.tp_group = allreduce_dgrad, sequence_parallel, tp_group
        ctx.grad_output_buffer, ctx.wgrad_deferral_limit = None, None
        x = _gathered(input, tp_group) if sequence_parallel else input
        out = products.linear(x.flatten(0, -2), weight).view(*x.shape[:-1], len(weight))
        return out if bias is None else out + bias


def _gathered(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Every rank's rows, concatenated in rank order."""
    assert group is not None
    out = x.new_empty(len(x) * group.size(), *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


class _Product(torch.autograd.Function):
    """x [..., K] w^T [N, K], computed in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, w)
        return products.linear(x.flatten(0, -2).to(dtype), w.to(dtype)).view(*x.shape[:-1], len(w))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        of_w = grad.flatten(0, -2).t() @ x.flatten(0, -2).to(grad.dtype)
        return (grad @ w.to(grad.dtype)).to(x.dtype), of_w.to(w.dtype), None


class _RowParallel(torch.autograd.Function):
    """x [S tp, 1, K / tp] of every rank, w [N, K / tp] -> this rank's [S, 1, N] of the sum over ranks: fp32 partial
    sums, added in rank order and rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        share = products.partial(x.flatten(0, -2), w).view(*x.shape[:-1], len(w))
        shares = torch.empty_like(share)
        dist.all_to_all_single(shares, share, group=group)
        return products.in_rank_order(shares.chunk(group.size())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        grad = _gathered(grad, ctx.group)
        return grad @ w, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class _ExactForward:
    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        bias: Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        grad_output_buffer: None = None,
        wgrad_deferral_limit: None = None,
    ) -> Tensor:
        out: Tensor = _Linear.apply(
            input,
            weight,
            bias,
            gradient_accumulation_fusion,
            allreduce_dgrad,
            sequence_parallel,
            grad_output_buffer,
            wgrad_deferral_limit,
            tp_group,
        )
        return out


class ExactColumnParallelLinear(_ExactForward, ColumnParallelLinear):
    """A rank's outputs are columns of the full product: the bits do not depend on the number of ranks."""


class ExactRowParallelLinear(_ExactForward, RowParallelLinear):
    """Over several tensor-parallel ranks a sum of one shard per rank; the engine computes the same shards."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.tp_group.size() == 1:
            return super().forward(input_)  # type: ignore[no-any-return]
        if self.explicit_expert_comm:  # a single expert
            return _GroupedShare.apply(input_, [len(input_)], self.weight), None  # type: ignore[no-untyped-call]
        assert self.input_is_parallel and self.sequence_parallel
        out: Tensor = _RowParallel.apply(input_, self.weight, self.tp_group)  # type: ignore[no-untyped-call]
        if self.skip_bias_add:
            return out, self.bias
        return (out if self.bias is None else out + self.bias), None


class ExactDuplicatedLinear(DuplicatedLinear):
    """A replicated linear with an exact product."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # as DuplicatedLinear
        out: Tensor = _Product.apply(x, self.weight, x.dtype)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias, None


# ---- attention


class _Attention(torch.autograd.Function):
    """The engine's attention forward; backward recomputes and differentiates `padded_causal_attention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ahead: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.ahead, ctx.scale = ahead, scale
        return attention.attention(q, k, v, scale, ahead)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            q, k, v = inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = padded_causal_attention(q, k, v, ctx.ahead, ctx.scale)
        return *torch.autograd.grad(out, inputs, grad), None, None


class ExactCoreAttention(SDPACoreAttention):
    """Core attention with exact scores, softmax and sums."""

    attend = staticmethod(_Attention.apply)


# ---- experts


class _GroupedLinear(GroupedLinear):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(x, *weights)
        return products.grouped_linear(x, weights, sizes)


class _GroupedShare(GroupedLinear):
    """An expert-tensor-parallel rank's fp32 partial sum of `_GroupedLinear`; the dispatcher adds the ranks' sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(x, *weights)
        return products.grouped_linear(x.float(), weights, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return GroupedLinear.backward(ctx, grad.to(ctx.saved_tensors[0].dtype))


class _SwiGLU(SwiGLUFunction):
    @staticmethod
    def forward(ctx: Any, input: Tensor) -> Tensor:
        ctx.save_for_backward(input)
        ctx.ori_input_dtype, ctx.fp8_input_store = input.dtype, False
        return rows.swiglu(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return SwiGLUFunction.backward(ctx, grad)[0]  # type: ignore[no-any-return]


class _WeightedSwiGLU(WeightedSwiGLUFunction):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(input, weights)
        ctx.ori_input_dtype, ctx.fp8_input_store = input.dtype, False
        return rows.swiglu(input, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        of_input, of_weights, _ = WeightedSwiGLUFunction.backward(ctx, grad)
        return of_input, of_weights


class ExactGroupedMLP(LocalGroupedMLP):
    """Pads experts to a multiple of rows in fp32 too, so that products need no copy."""

    def product(self, name: str, x: Tensor, weights: Sequence[Tensor]) -> type[GroupedLinear]:
        shared_out = name == "linear_fc2" and self.config.expert_tensor_parallel_size > 1
        return _GroupedShare if shared_out else _GroupedLinear

    def fills_up(self, x: Tensor) -> bool:
        return True

    def activate(self, h: Tensor, weights: Tensor) -> Tensor:
        return _WeightedSwiGLU.apply(h, weights)  # type: ignore[no-any-return]


class ExactDispatcher(MoEAlltoAllTokenDispatcher):
    """Adds experts' outputs in fp32, by ascending expert, and rounds once. Each output is the fp32 sum of at most two
    expert-tensor-parallel partial sums, whose order does not matter, rounded once."""

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        assert self.tp_size <= 2 and self.probs.dtype is torch.float32  # the dtype of the partial sums
        return super().combine_preprocess(hidden_states).to(self.config.params_dtype)  # type: ignore[no-any-return]

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        rows_ = permutated_local_input_tokens
        assert self.shared_experts is None
        return super().combine_postprocess(rows_.float()).to(rows_.dtype)  # type: ignore[no-any-return]


class ExactRouter(MaskedRouter):
    """A router whose logits are an exact product."""

    def gating(self, input: Tensor) -> Tensor:
        """[T, 1, H] -> logits fp32 [T, 1, E]."""
        assert self.bias is None and self.config.moe_router_dtype == "fp32"
        out: Tensor = _Product.apply(input, self.weight, torch.float32)  # type: ignore[no-untyped-call]
        return out


def route(
    logits: Tensor,  # [T, E] fp32
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: routing.Score = "softmax",
    expert_bias: Tensor | None = None,
    fused: bool = False,
    router_replay: Any = None,
) -> tuple[Tensor, Tensor]:
    """Replaces megatron's topk_routing_with_score_function: (probs [T, E], routing map [T, E] bool)."""
    assert not fused
    scores = routing.scores(logits, score_function)

    def choose(by: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None) -> Any:
        ids = routing.choose(by.detach(), topk, groups=num_groups or 1, group_topk=group_topk or 1)
        return by.gather(1, ids), ids

    by = scores if expert_bias is None else scores + expert_bias
    if router_replay is None:
        ids = choose(by, topk, num_groups, group_topk)[1]
    else:
        ids = router_replay.get_replay_topk(by, topk, num_groups, group_topk, choose)[1]
    renormalize = score_function == "sigmoid" or not use_pre_softmax
    gates = routing.gates(scores, ids, scale=scaling_factor or 1.0, renormalize=renormalize)
    return torch.zeros_like(logits).scatter(1, ids, gates), torch.zeros_like(logits).scatter(1, ids, 1.0).bool()


def _swiglu(input: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    """Replaces megatron's bias_swiglu_impl, for any leading dimensions."""
    assert bias is None
    return _SwiGLU.apply(input.flatten(0, -2)).view(*input.shape[:-1], -1)  # type: ignore[no-any-return]


EXACT_MODULES: dict[type, type] = {
    ColumnParallelLinear: ExactColumnParallelLinear,
    RowParallelLinear: ExactRowParallelLinear,
    DuplicatedLinear: ExactDuplicatedLinear,
    SDPACoreAttention: ExactCoreAttention,
    LocalGroupedMLP: ExactGroupedMLP,
    MaskedRouter: ExactRouter,
}

# Functions that megatron's modules look up as module attributes, not as submodules: (module, name, replacement).
_FUNCTIONS: tuple[tuple[Any, str, Any], ...] = (
    (router, "topk_routing_with_score_function", route),
    (moe_layer, "MoEAlltoAllTokenDispatcher", ExactDispatcher),
    (mlp, "bias_swiglu_impl", _swiglu),
    (shared_experts, "bias_swiglu_impl", _swiglu),
)
_STOCK = [getattr(where, name) for where, name, _ in _FUNCTIONS]


def use_exact_functions(on: bool) -> None:
    """Make megatron's modules in this process call the exact functions, or megatron's own."""
    for (where, name, exact), stock in zip(_FUNCTIONS, _STOCK, strict=True):
        setattr(where, name, exact if on else stock)
