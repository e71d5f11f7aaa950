"""Low-rank adapters (LoRA, arXiv:2106.09685) in weight space: the trained weights are bitwise the published ones.

A linear with weight W [out, in] computes with W' = cast(W + alpha / rank * B A), where B [out, r] A [r, in] is computed
in fp32 and the sum is rounded once to W's dtype; the cast's gradient is taken as 1. Adapters on activations, x W^T +
alpha / rank * (x A^T) B^T, would train a different function than the merged bf16 weight that the rollout serves. The
cost: a product of inner size r and a copy of the weight each time a linear runs, the copy held until its backward.

Only the adapters train; every other parameter is frozen. Over tensor-parallel ranks the adapter on the sharded side of
W is sharded like it and the other is replicated: a rank's gradient of it is a partial sum, which backward sums over
ranks. gate and up, and query, key and value, are one matrix in Megatron: their adapter acts on the fused matrix.

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

from megatron_bridge.config import LoraConfig
from megatron_bridge.convert.directory.torch_dist import TorchDist
from megatron_bridge.device.collective_errors import gather_objects
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.model.local_modules import DuplicatedLinear
from megatron_bridge.model.weight_functions import use_weight_function
from megatron_bridge.optim.optimizer import keep_graph
from megatron_bridge.optim.param_names import renamer

ADAPTERS = ("lora_a", "lora_b")
_WHERE = {"attention": ".self_attention.", "experts": ".experts.", "shared_experts": ".shared_experts."}


def attach_adapters(models: Sequence[Any], config: LoraConfig, parallel: ParallelContext, *, seed: int) -> None:
    """Add adapters to the target linears of this rank's unwrapped chunks and freeze everything else. Call it before the
    model is cast and before its gradient buffers are made. Collective. A is random and B zero: W' is W, in every
    layout.

    Raises ValueError for a target that no layer of the model has, and for a rank above a target's smaller dimension.
    """
    if not config.rank:
        return
    for model in models:
        model.requires_grad_(False)
    targets = list(_targets(models, config, parallel))
    found = gather_objects([(target, min(_shape(linear)), name) for target, name, linear in targets])
    everywhere = [row for rows in found for row in rows]
    for target in config.targets:
        sizes = [(size, name) for kind, size, name in everywhere if kind == target]
        if not sizes:
            raise ValueError(f"lora.targets: {target!r} matches no linear of this model's layers: remove it")
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
                        f"lora.targets: {name} is a {type(module).__name__}, which does not support adapters: set "
                        "kernels.spec = 'local'"
                    )
                yield target, rename(name), module


def _shape(linear: Any) -> tuple[int, int]:
    """(out, in) of the unsharded weight."""
    if isinstance(linear, DuplicatedLinear):
        outputs, inputs = linear.weight.shape
        return outputs, inputs
    return linear.output_size, linear.input_size


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
    use_weight_function(linear, _merge(linear, config.alpha / config.rank, split[0] if split else None))


def _initial_a(rank: int, inputs: int, key: str) -> Tensor:
    """[r, in] fp32, uniform within 1 / sqrt(in) as in peft; the same numbers for a name on any rank."""
    digest = hashlib.sha256(key.encode()).digest()
    g = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (2 * torch.rand(rank, inputs, generator=g) - 1) / math.sqrt(inputs)


def _mark(linear: Any, adapter: Any, *, divided: bool) -> None:
    """Set the attributes by which Megatron averages a parameter's gradient and counts its copies in the norm."""
    adapter.merged = True  # published as part of the weight
    expert = getattr(linear, "is_expert", False)
    adapter.allreduce = not expert
    adapter.tensor_model_parallel = divided
    adapter.partition_dim, adapter.partition_stride = (-1, 1) if not divided else (0, 1)
    if isinstance(linear, DuplicatedLinear):
        adapter.sequence_parallel = linear.sequence_parallel
    if expert and not divided:
        # The norm selects one copy of an unsharded parameter by the rank in the *dense* tensor-parallel group, which
        # is unrelated to experts: make it count all copies except those that are marked as shared here.
        adapter.tensor_model_parallel = True
        adapter.shared = linear.tp_group.rank() > 0


def _merge(linear: Any, scale: float, divided: str | None) -> Callable[[Tensor], Tensor]:
    def whole(name: str) -> Tensor:
        adapter: Tensor = getattr(linear, name).float()
        if divided is None or name == divided or linear.tp_group.size() == 1:
            return adapter
        summed: Tensor = copy_to_tensor_model_parallel_region(
            adapter, group=linear.tp_group
        )  # backward sums over ranks
        return summed

    def merge(weight: Tensor) -> Tensor:
        return (weight.float() + scale * (whole("lora_b") @ whole("lora_a"))).to(weight.dtype)

    return merge


def _shard(linear: Any, adapter: str, axis: int, *, gated: bool) -> None:
    """Store the adapter as a sharded tensor; Megatron's linears shard only `weight` and `bias`."""
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
            f"checkpoint {source.path} holds LoRA adapters, but lora.rank = 0: set lora.rank to that of its run"
        )
    return stored


@torch.no_grad()
def reset_adapters(models: Sequence[Any]) -> None:
    """Set B to zero, so that a model read from a checkpoint without adapters equals that checkpoint."""
    for model in models:
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.zero_()
