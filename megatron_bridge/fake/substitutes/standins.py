"""Replacements of kernels: functions that allocate what a kernel returns, and keep what it keeps for backward.

On fake CUDA ranks megatron's local modules replace TransformerEngine's, which have the same parameters: its linears and
norms keep the same inputs, its grouped linear pads nothing in BF16, its norms and rotary embeddings have no
temporaries, its attention is a flash kernel.

Letters: T packed tokens, c of them on this context-parallel rank, h heads, g key/value heads, d query/key and v value
size of a head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_bridge.config import KernelsConfig, TrainerConfig
from megatron_bridge.fake.substitutes.facts import CoreAttention
from megatron_bridge.fake.substitutes.substitute import Substitute
from megatron_bridge.fake.substitutes.tensors import RankMode, outside
from megatron_bridge.plan.resolve import Resolved, resolve

_LOCAL = "megatron_bridge.model.local_modules"


# ---- attention


class FlashAttention(torch.autograd.Function):
    """A flash kernel keeps q, k, v, its output, and one number per row and head."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, counter: CoreAttention) -> Tensor:
        """query [c, h, d], key [c, g, d], value [c, g, v] -> [c, h, v]."""
        rows, heads, size = query.shape
        ctx.counter, ctx.cost = counter, counter.forward(heads, size, value.shape[2])
        out = value.new_empty(rows, heads, value.shape[2])
        log_sum = query.new_empty(heads, rows, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        ctx.counter.backward(ctx.cost)
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _flash(counter: CoreAttention) -> Any:
    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[c, h * v]. A ring of context-parallel ranks holds the keys and values of all while it runs."""
        others = self.cp_group.size() - 1
        ring = [x.new_empty(len(x) * others, *x.shape[1:]) for x in (key, value)] if others else []
        out: Tensor = FlashAttention.apply(query, key, value, counter)  # type: ignore[no-untyped-call]
        del ring
        return out.flatten(1)

    return forward


def _counted(stock: Any, counter: CoreAttention) -> Any:
    """The stock function of CPU ranks, with its operations counted."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        cost = counter.forward(query.shape[1], query.shape[2], value.shape[2])
        out: Tensor = stock(query, key, value, *args, **kwargs)
        if out.requires_grad:
            out.register_hook(lambda grad: counter.backward(cost))
        return out

    return attention


# ---- norms and rotary embeddings


class _Norm(torch.autograd.Function):
    """An RMSNorm kernel keeps its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), None


class _Rope(torch.autograd.Function):
    """A rotary kernel: nothing of its input's size is kept."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return torch.empty_like(t)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


def _rope(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    out: Tensor = _Rope.apply(t)  # type: ignore[no-untyped-call]
    return out


# ---- tables


def _positions(mode: RankMode) -> Substitute:
    def make(stock: Any) -> Any:
        def packed_positions(cu_seqlens: tuple[int, ...], rank: int, size: int, device: torch.device) -> Tensor:
            return mode.of(outside(stock)(cu_seqlens, rank, size, torch.device("cpu")))

        return packed_positions

    return Substitute("megatron_bridge.model.packed_rope", "packed_positions", "lengths of samples", make)


def cpu_substitutes(mode: RankMode, counter: CoreAttention) -> tuple[Substitute, ...]:
    """CPU ranks run the trainer's own attention; only its indices are made of real numbers."""
    return (
        Substitute(_LOCAL, "_planned", "lengths of samples", outside),
        Substitute(_LOCAL, "_causal_blocks", "lengths of samples", outside),
        _positions(mode),
        Substitute(_LOCAL, "packed_causal_attention", "operations counted", lambda stock: _counted(stock, counter)),
    )


def cuda_substitutes_of(
    mode: RankMode, counter: CoreAttention, kernels: KernelsConfig, *, te: bool
) -> tuple[Substitute, ...]:
    """Replacements of a CUDA rank's kernels. te: the rank's modules are TransformerEngine's."""
    attention = Substitute(f"{_LOCAL}:SDPACoreAttention", "forward", "flash attention", lambda _: _flash(counter))
    rope = Substitute(_LOCAL, "apply_packed_rope", "rotary kernel", lambda _: _rope)
    if not te:
        return attention, _positions(mode)
    return (
        attention,
        rope if kernels.rope_fusion else _positions(mode),
        Substitute(_LOCAL, "_RMSNorm", "TransformerEngine's norm", lambda _: _Norm),
        Substitute(
            "megatron_bridge.model.grouped_experts:LocalGroupedMLP",
            "fills_up",
            "TransformerEngine's grouped linear",
            lambda _: lambda self, dtype: False,
        ),
    )


def _checked(config: TrainerConfig) -> None:
    """Raise ValueError for what no module here stands for."""
    if config.kernels.fp8 != "none":
        raise ValueError(
            f"kernels.fp8 = {config.kernels.fp8!r} cannot be executed on fake tensors, which do not support "
            "TransformerEngine's FP8 modules: set it to 'none' to execute the rank in BF16"
        )
    if "moe_act" in config.recompute_modules:
        raise ValueError(
            f"recompute_modules = {list(config.recompute_modules)} cannot be executed on fake tensors, which do "
            "not support recomputing activations of TransformerEngine's experts: remove 'moe_act'"
        )


def without_te(resolved: Resolved) -> Resolved:
    """The settings of the local modules that replace those of a TransformerEngine rank."""
    transformer = resolved.transformer.copy()
    transformer["apply_rope_fusion"] = False
    if "moe_grouped_gemm" in transformer:
        transformer |= {"moe_grouped_gemm": False, "moe_permute_fusion": False}
    forward = "deterministic" if resolved.forward == "batch invariant" else resolved.forward
    return replace(resolved, spec="local", forward=forward, transformer=transformer)


def resolve_substitute() -> Substitute:
    """The trainer's `resolve`, with local modules in place of TransformerEngine's."""

    def make(stock: Any) -> Any:
        def resolve_here(config: TrainerConfig, hf: Any, *, cuda: bool, **_: Any) -> Resolved:
            return resolved_rank(config, hf, cuda=cuda)

        return resolve_here

    return Substitute("megatron_bridge.trainer", "resolve", "local modules for TransformerEngine's", make)


def resolved_rank(config: TrainerConfig, hf: Any, *, cuda: bool) -> Resolved:
    """The settings that a rank is executed with: those of a machine with TransformerEngine and GPUs that support every
    recipe, built of local modules. Raises ValueError as `resolve`, and for modules without a replacement."""
    resolved = resolve(config, hf, cuda=cuda, te=cuda)
    if cuda:
        _checked(config)
    return without_te(resolved) if resolved.spec == "te" else resolved
