"""Megatron's modules computing forward by the operations that the embedded engine computes by (`quant.exact`).

Backward stays megatron's, or plain torch's: equality of log-probabilities is one of forward passes.

Letters: S rows of a sequence-parallel region, T packed tokens, E experts, K of them a token, N outputs, H hidden size.
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

from megatron_bridge.grouped_experts import GroupedLinear, LocalGroupedMLP
from megatron_bridge.local_modules import DuplicatedLinear, SDPACoreAttention, padded_causal_attention
from megatron_bridge.router import MaskedRouter
from quant.exact import attention, products, routing, rows

# ---- linears


class _Linear(LinearWithGradAccumulationAndAsyncCommunication):
    """The stock function, whose arguments it has, but for the product of forward."""

    @staticmethod
    @custom_fwd
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
    """Every rank's rows, end to end."""
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        of_w = grad.flatten(0, -2).t() @ x.flatten(0, -2).to(grad.dtype)
        return (grad @ w.to(grad.dtype)).to(x.dtype), of_w.to(w.dtype), None


class _RowParallel(torch.autograd.Function):
    """x [S tp, 1, K / tp] of every rank, w [N, K / tp] -> this rank's [S, 1, N] of the sum over ranks: fp32 shares,
    added in the order of ranks, rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.group = group
        share = products.partial(x.flatten(0, -2), w).view(*x.shape[:-1], len(w))
        shares = torch.empty_like(share)
        dist.all_to_all_single(shares, share, group=group)
        return products.in_rank_order(shares.chunk(group.size())).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        grad = _gathered(grad, ctx.group)
        return grad @ w, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class _Forward:
    def _forward_impl(self, input: Tensor, weight: Tensor, **how: Any) -> Tensor:
        names = ("bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel")
        names += ("grad_output_buffer", "wgrad_deferral_limit", "tp_group")
        return _Linear.apply(input, weight, *(how.get(name) for name in names))  # type: ignore[no-any-return]


class ExactColumnParallelLinear(_Forward, ColumnParallelLinear):
    """Outputs are columns of the whole product: the same bits on any number of ranks."""


class ExactRowParallelLinear(_Forward, RowParallelLinear):
    """Over tensor-parallel ranks a sum of parts, of which the engine computes as many."""

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.tp_group.size() == 1:
            return super().forward(input_)  # type: ignore[no-any-return]
        if self.explicit_expert_comm:  # an expert by itself
            return _GroupedShare.apply(input_, [len(input_)], self.weight), None
        assert self.input_is_parallel and self.sequence_parallel
        out = _RowParallel.apply(input_, self.weight, self.tp_group)
        if self.skip_bias_add:
            return out, self.bias
        return (out if self.bias is None else out + self.bias), None


class ExactDuplicatedLinear(DuplicatedLinear):
    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        out = _Product.apply(x, self.weight, x.dtype)
        return out if self.bias is None else out + self.bias, None


# ---- attention


class _Attention(torch.autograd.Function):
    """As `padded_causal_attention`, whose backward it has."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ahead: Tensor | None, scale: float) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.ahead, ctx.scale = ahead, scale
        return attention.attention(q, k, v, scale, ahead)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = padded_causal_attention(*inputs, ctx.ahead, ctx.scale)
        return *torch.autograd.grad(out, inputs, grad), None, None


class ExactCoreAttention(SDPACoreAttention):
    attend = staticmethod(_Attention.apply)


# ---- experts


class _GroupedLinear(GroupedLinear):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(x, *weights)
        return products.grouped_linear(x, weights, sizes)


class _GroupedShare(GroupedLinear):
    """An expert-tensor-parallel rank's share of that, fp32, for the ranks to add up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.sizes = sizes
        ctx.save_for_backward(x, *weights)
        return products.grouped_linear(x.float(), weights, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
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
    """Experts in fp32 too get a multiple of rows, so that they are multiplied as they lie."""

    def product(self, name: str) -> type[GroupedLinear]:
        shared_out = name == "linear_fc2" and self.config.expert_tensor_parallel_size > 1
        return _GroupedShare if shared_out else _GroupedLinear

    def fills_up(self, dtype: torch.dtype) -> bool:
        return True

    def activate(self, h: Tensor, weights: Tensor) -> Tensor:
        return _WeightedSwiGLU.apply(h, weights)  # type: ignore[no-any-return]


class ExactDispatcher(MoEAlltoAllTokenDispatcher):
    """Experts' outputs are added in fp32, by ascending expert, and rounded once. Each is the sum of its two
    expert-tensor-parallel shares in fp32, which has no order, rounded once."""

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        assert self.tp_size <= 2 and self.probs.dtype is torch.float32  # what shares are added up in
        return super().combine_preprocess(hidden_states).to(self.config.params_dtype)  # type: ignore[no-any-return]

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        rows_ = permutated_local_input_tokens
        assert self.shared_experts is None
        return super().combine_postprocess(rows_.float()).to(rows_.dtype)  # type: ignore[no-any-return]


class ExactRouter(MaskedRouter):
    def gating(self, input: Tensor) -> Tensor:
        """[T, 1, H] -> logits fp32 [T, 1, E]."""
        assert self.bias is None and self.config.moe_router_dtype == "fp32"
        return _Product.apply(input, self.weight, torch.float32)  # type: ignore[no-any-return]


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
    """Stands for megatron's topk_routing_with_score_function: (probs [T, E], routing map [T, E] bool)."""
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
    """Stands for megatron's bias_swiglu_impl, of any leading dimensions."""
    assert bias is None
    return _SwiGLU.apply(input.flatten(0, -2)).view(*input.shape[:-1], -1)  # type: ignore[no-any-return]


SWAPS: dict[type, type] = {
    ColumnParallelLinear: ExactColumnParallelLinear,
    RowParallelLinear: ExactRowParallelLinear,
    DuplicatedLinear: ExactDuplicatedLinear,
    SDPACoreAttention: ExactCoreAttention,
    LocalGroupedMLP: ExactGroupedMLP,
    MaskedRouter: ExactRouter,
}

# What megatron's modules call by name rather than as a submodule: (where, name, what stands there).
_CALLED: tuple[tuple[Any, str, Any], ...] = (
    (router, "topk_routing_with_score_function", route),
    (moe_layer, "MoEAlltoAllTokenDispatcher", ExactDispatcher),
    (mlp, "bias_swiglu_impl", _swiglu),
    (shared_experts, "bias_swiglu_impl", _swiglu),
)
_STOCK = [getattr(where, name) for where, name, _ in _CALLED]


def call_exact(on: bool) -> None:
    """Let megatron's modules in this process call the exact functions, or their own."""
    for (where, name, exact), stock in zip(_CALLED, _STOCK, strict=True):
        setattr(where, name, exact if on else stock)
