"""Low-rank adapters (LoRA, arXiv:2106.09685) in weight space: what is trained is bit for bit what is published.

A linear with weight W [out, in] computes with W' = cast(W + alpha / rank * B A), where B [out, r] A [r, in] is made in
fp32 and the sum is rounded once to W's dtype; the cast's gradient is taken as 1. Adapters on activations, x W^T +
alpha / rank * (x A^T) B^T, would train another function than the merged bf16 weight that the rollout serves. The price:
a product of inner size r and a copy of the weight each time a linear runs, the copy held until its backward.

Only the adapters train; every other parameter is frozen. Over tensor-parallel ranks the adapter on the divided side of
W is divided like it and the other is whole: its gradient on a rank is a part of the sum, and is added up in backward.
gate and up, and query, key and value, are one matrix in Megatron: their adapter acts on the fused one.

Letters: r rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from megatron_bridge.agree import gather
from megatron_bridge.config import LoraConfig
from megatron_bridge.convert.torch_dist import TorchDist
from megatron_bridge.effective import use_effective_weight
from megatron_bridge.local_modules import DuplicatedLinear
from megatron_bridge.optimizer import keep_graph
from megatron_bridge.parallel import ParallelContext
from megatron_bridge.param_names import renamer

ADAPTERS = ("lora_a", "lora_b")
_WHERE = {"attention": ".self_attention.", "experts": ".experts.", "shared_experts": ".shared_experts."}


def attach(models: Sequence[Any], config: LoraConfig, parallel: ParallelContext, *, seed: int) -> None:
    """Adapters on the target linears of this rank's unwrapped chunks, all else frozen. Before the model is cast and
    before its gradient buffers are made. Collective. A random, B zero: W' is W, in every layout.

    Raises ValueError for a target that no layer of the model has, and for a rank above a target's smaller dimension.
    """
    if not config.rank:
        return
    for model in models:
        model.requires_grad_(False)
    targets = list(_targets(models, config, parallel))
    found = gather([(target, min(_shape(linear)), name) for target, name, linear in targets])
    everywhere = [row for rows in found for row in rows]
    for target in config.targets:
        sizes = [(size, name) for kind, size, name in everywhere if kind == target]
        if not sizes:
            raise ValueError(f"lora.targets: {target!r} names no linear of this model's layers: remove it")
        if min(sizes)[0] < config.rank:
            raise ValueError(
                f"lora.rank = {config.rank} is above the smaller dimension of {min(sizes)[1]}, {min(sizes)[0]}: "
                "lower it or narrow lora.targets"
            )
    for _, name, linear in targets:
        _adapt(linear, name, config, seed)
    keep_graph(models)


def _targets(
    models: Sequence[Any], config: LoraConfig, parallel: ParallelContext
) -> Iterator[tuple[str, str, torch.nn.Module]]:
    """(target, global name, linear) of this rank's decoder layers."""
    for model in models:
        rename = renamer(model, parallel)
        for name, module in model.named_modules():
            if not name.startswith("decoder.layers.") or ".linear_" not in name:
                continue
            target = next((kind for kind, part in _WHERE.items() if part in name), "mlp")
            if target in config.targets:
                if not isinstance(module, (ColumnParallelLinear, RowParallelLinear, DuplicatedLinear)):
                    raise ValueError(
                        f"lora.targets: {name} is a {type(module).__name__}, which takes no adapters: set "
                        "kernels.spec = 'local'"
                    )
                yield target, rename(name), module


def _shape(linear: Any) -> tuple[int, int]:
    """Of the whole weight, (out, in)."""
    return (
        tuple(linear.weight.shape) if isinstance(linear, DuplicatedLinear) else (linear.output_size, linear.input_size)
    )


def _adapt(linear: Any, name: str, config: LoraConfig, seed: int) -> None:
    weight: Tensor = linear.weight
    a = _initial_a(config.rank, _shape(linear)[1], f"{seed} {name}")
    split = None  # the adapter that is divided over tensor-parallel ranks, and its axis
    if isinstance(linear, ColumnParallelLinear):
        split = ("lora_b", 0)
    elif isinstance(linear, RowParallelLinear):
        split = ("lora_a", 1)
        a = a.chunk(linear.tp_group.size(), 1)[linear.tp_group.rank()]
    linear.lora_a = Parameter(a.contiguous().to(weight))
    linear.lora_b = Parameter(weight.new_zeros(weight.shape[0], config.rank))
    for adapter in ADAPTERS:
        _mark(linear, getattr(linear, adapter), divided=split is not None and split[0] == adapter)
    if split is not None:
        _shard(linear, *split, gated=name.endswith(".linear_fc1") and linear.config.gated_linear_unit)
    use_effective_weight(linear, _merge(linear, config.alpha / config.rank, split[0] if split else None))


def _initial_a(rank: int, inputs: int, key: str) -> Tensor:
    """[r, in] fp32, uniform within 1 / sqrt(in) as in peft; the same numbers wherever a name lives."""
    digest = hashlib.sha256(key.encode()).digest()
    g = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (2 * torch.rand(rank, inputs, generator=g) - 1) / math.sqrt(inputs)


def _mark(linear: Any, adapter: Any, *, divided: bool) -> None:
    """What Megatron wants to know of a parameter: whose gradients are averaged, and which copies a norm counts."""
    adapter.merged = True  # it is published inside the weight
    expert = getattr(linear, "is_expert", False)
    adapter.allreduce = not expert
    adapter.tensor_model_parallel = divided
    adapter.partition_dim, adapter.partition_stride = (-1, 1) if not divided else (0, 1)
    if isinstance(linear, DuplicatedLinear):
        adapter.sequence_parallel = linear.weight.sequence_parallel
    if expert and not divided:
        # The norm takes one copy of what is not divided by the rank in the *dense* tensor-parallel group, which says
        # nothing about experts: let it count all copies, but for those this marks as shared.
        adapter.tensor_model_parallel = True
        adapter.shared = linear.tp_group.rank() > 0


def _merge(linear: Any, scale: float, divided: str | None) -> Callable[[Tensor], Tensor]:
    def whole(name: str) -> Tensor:
        adapter: Tensor = getattr(linear, name).float()
        if divided is None or name == divided or linear.tp_group.size() == 1:
            return adapter
        return copy_to_tensor_model_parallel_region(adapter, group=linear.tp_group)  # backward adds the ranks' parts

    def merge(weight: Tensor) -> Tensor:
        return (weight.float() + scale * (whole("lora_b") @ whole("lora_a"))).to(weight.dtype)

    return merge


def _shard(linear: Any, adapter: str, axis: int, *, gated: bool) -> None:
    """Megatron's linears know how `weight` and `bias` are divided; any other parameter would be stored as whole."""
    stock = linear.sharded_state_dict

    def sharded_state_dict(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = stock(prefix, sharded_offsets, metadata)
        key = prefix + adapter
        state[key] = make_tp_sharded_tensor_for_checkpoint(
            getattr(linear, adapter),
            key,
            axis,
            prepend_offsets=sharded_offsets,
            tp_group=linear.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        if gated:  # a rank's rows are [gate part; up part]
            state[key] = apply_swiglu_sharded_factory(state[key], sharded_offsets)
        return state

    linear.sharded_state_dict = sharded_state_dict


def check_adapters(source: TorchDist, models: Sequence[Any]) -> bool:
    """Whether the checkpoint `source` holds adapters. Raises ValueError when it does and the model has none."""
    stored = any(key.endswith(ADAPTERS) for key in source.names())
    if stored and not any(name.endswith(ADAPTERS) for model in models for name, _ in model.named_parameters()):
        raise ValueError(
            f"checkpoint {source.path} holds LoRA adapters, but lora.rank = 0: set the lora.rank it was made with"
        )
    return stored


@torch.no_grad()
def reset_adapters(models: Sequence[Any]) -> None:
    """B is zero again: a model read from a checkpoint without adapters is that checkpoint's."""
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.zero_()
