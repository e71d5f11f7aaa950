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
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn import Parameter

from megatron_bridge.config import LoraConfig
from megatron_bridge.convert.directory.torch_dist import TorchDist
from megatron_bridge.device.collective_errors import gather_objects
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.model.weight_functions import use_weight_function
from megatron_bridge.optim.optimizer import keep_graph
from megatron_bridge.optim.param_names import renamer
from megatron_bridge.optim.te_names import local_name

ADAPTERS = ("lora_a", "lora_b")
_WHERE = {"attention": ".self_attention.", "experts": ".experts.", "shared_experts": ".shared_experts."}
_SIDES = {  # class of a linear, or the first of its bases that is here -> the side that tensor-parallel ranks divide
    "ColumnParallelLinear": "column",
    "TEColumnParallelLinear": "column",
    "TELayerNormColumnParallelLinear": "column",
    "TEColumnParallelGroupedLinear": "column",
    "RowParallelLinear": "row",
    "TERowParallelLinear": "row",
    "TERowParallelGroupedLinear": "row",
    "DuplicatedLinear": "copied",
    "TELinear": "copied",
}


@dataclass(frozen=True, slots=True)
class _Target:
    """A weight of this rank's decoder layers that gets adapters.

    kind: of `lora.targets`; name: the linear's, of the local spec, with global numbers; weight: of the parameter in
    `linear`, whose grouped form has one per expert; side: whose rows or columns tensor-parallel ranks divide, if any.
    """

    kind: str
    name: str
    linear: Any
    weight: str
    side: str  # "column", "row" or "copied"

    @property
    def is_expert(self) -> bool:
        return self.kind == "experts"

    @property
    def number(self) -> str:
        """Of the expert in a grouped linear, which the names of its parameters end with; else empty."""
        return self.weight.removeprefix("weight")

    @property
    def group(self) -> Any:
        """The ranks that divide the weight."""
        return getattr(self.linear, "_tp_group", None) or self.linear.tp_group

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the undivided weight."""
        outputs, inputs = getattr(self.linear, self.weight).shape
        if self.side == "copied":
            return outputs, inputs
        ranks = self.group.size()
        return (outputs * ranks, inputs) if self.side == "column" else (outputs, inputs * ranks)

    @property
    def divided(self) -> tuple[str, int] | None:
        """The adapter that tensor-parallel ranks divide, and along which axis."""
        return {"column": ("lora_b", 0), "row": ("lora_a", 1), "copied": None}[self.side]


def attach_adapters(models: Sequence[Any], config: LoraConfig, parallel: ParallelContext, *, seed: int) -> None:
    """Add adapters to the target linears of this rank's unwrapped chunks and freeze everything else. Call it before the
    model is cast and before its gradient buffers are made. Collective. A is random and B zero: W' is W, in every
    layout and of both kinds of modules.

    Raises ValueError for a target that no layer of the model has, and for a rank above a target's smaller dimension.
    """
    if not config.rank:
        return
    for model in models:
        model.requires_grad_(False)
    targets = list(_targets(models, config, parallel))
    found = gather_objects([(t.kind, min(t.shape), t.name) for t in targets])
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
    for t in targets:
        _adapt(t, config, seed)
    _store(targets)
    keep_graph(models)


def _targets(models: Sequence[Any], config: LoraConfig, parallel: ParallelContext) -> Iterator[_Target]:
    for model in models:
        rename = renamer(model, parallel)
        for name, module in model.named_modules():
            if not name.startswith("decoder.layers.") or ".linear_" not in name:
                continue
            kind = next((kind for kind, part in _WHERE.items() if part in name), "mlp")
            if kind not in config.targets:
                continue
            side = next((_SIDES[c.__name__] for c in type(module).__mro__ if c.__name__ in _SIDES), None)
            if side is None:
                raise ValueError(f"lora.targets: {name} is a {type(module).__name__}, which does not support adapters")
            count = getattr(module, "num_gemms", None)
            for weight in ["weight"] if count is None else [f"weight{i}" for i in range(count)]:
                yield _Target(kind, rename(f"{name}.{weight}").removesuffix(".weight"), module, weight, side)


def _adapt(target: _Target, config: LoraConfig, seed: int) -> None:
    linear, number = target.linear, target.number
    weight: Tensor = getattr(linear, target.weight)
    a = _initial_a(config.rank, target.shape[1], f"{seed} {target.name}")
    if target.side == "row":
        a = a.chunk(target.group.size(), 1)[target.group.rank()]
    linear.register_parameter(f"lora_a{number}", Parameter(a.contiguous().to(weight)))
    linear.register_parameter(f"lora_b{number}", Parameter(weight.new_zeros(weight.shape[0], config.rank)))
    for adapter in ADAPTERS:
        _mark(target, adapter)
    use_weight_function(linear, _merge(target, config.alpha / config.rank), name=target.weight)


def _initial_a(rank: int, inputs: int, key: str) -> Tensor:
    """[r, in] fp32, uniform within 1 / sqrt(in) as in peft; the same numbers for a name on any rank."""
    digest = hashlib.sha256(key.encode()).digest()
    g = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return (2 * torch.rand(rank, inputs, generator=g) - 1) / math.sqrt(inputs)


def _mark(target: _Target, name: str) -> None:
    """Set the attributes by which Megatron averages a parameter's gradient and counts its copies in the norm."""
    adapter, divided = getattr(target.linear, name + target.number), target.divided
    own = divided is not None and divided[0] == name
    adapter.merged = True  # published as part of the weight
    adapter.allreduce = not target.is_expert
    adapter.tensor_model_parallel = own
    adapter.partition_dim, adapter.partition_stride = (-1, 1) if not own else (0, 1)
    if divided is None:
        adapter.sequence_parallel = getattr(target.linear, target.weight).sequence_parallel
    if target.is_expert and not own:
        # The norm selects one copy of an unsharded parameter by the rank in the *dense* tensor-parallel group, which
        # is unrelated to experts: make it count all copies except those that are marked as shared here.
        adapter.tensor_model_parallel = True
        adapter.shared = target.group.rank() > 0


def _merge(target: _Target, scale: float) -> Callable[[Tensor], Tensor]:
    divided = target.divided

    def whole(name: str) -> Tensor:
        adapter: Tensor = getattr(target.linear, name + target.number).float()
        if divided is None or name == divided[0] or target.group.size() == 1:
            return adapter
        summed: Tensor = copy_to_tensor_model_parallel_region(adapter, group=target.group)  # backward sums over ranks
        return summed

    def merge(weight: Tensor) -> Tensor:
        return (weight.float() + scale * (whole("lora_b") @ whole("lora_a"))).to(weight.dtype)

    return merge


def _store(targets: Sequence[_Target]) -> None:
    """Adapters are stored as they are divided, those of a grouped linear under the names of its experts' linears:
    Megatron's linears shard only `weight` and `bias`."""
    by_linear: dict[int, list[_Target]] = {}
    for target in targets:
        by_linear.setdefault(id(target.linear), []).append(target)
    for own in by_linear.values():
        if own[0].number or own[0].divided is not None:
            _store_of(own)


def _store_of(targets: Sequence[_Target]) -> None:
    linear = targets[0].linear
    stock = linear.sharded_state_dict

    def sharded_state_dict(prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        state = stock(prefix, sharded_offsets, metadata)
        for i, target in enumerate(targets):
            offsets, sharing = sharded_offsets, {"tp_group": target.group, "dp_cp_group": metadata["dp_cp_group"]}
            if target.number:
                experts = linear._pg_collection.ep
                place = (len(sharded_offsets), experts.rank() * len(targets) + i, experts.size() * len(targets))
                offsets = (*sharded_offsets, place)
            for adapter in ADAPTERS:
                if (value := _stored(target, adapter, prefix + adapter, offsets, sharing)) is None:
                    continue
                if target.number:  # experts are copied over fewer ranks than other weights, as the stock method says
                    copies = state[f"{prefix}weight{target.number}"].replica_id[2]
                    value.replica_id = (*value.replica_id[:2], copies)
                if _is_gated(target, adapter):  # a rank's rows are [gate part; up part]
                    value = apply_swiglu_sharded_factory(value, offsets)
                state[prefix + adapter + target.number] = value
        return state

    linear.sharded_state_dict = sharded_state_dict


def _is_gated(target: _Target, adapter: str) -> bool:
    gated = target.name.endswith(".linear_fc1") and target.linear.config.gated_linear_unit
    return gated and adapter == "lora_b"


def _stored(target: _Target, adapter: str, key: str, offsets: Any, sharing: dict[str, Any]) -> Any:
    """The adapter as a sharded tensor; None where the stock method has stored it, as one that every rank has whole."""
    value, divided = getattr(target.linear, adapter + target.number), target.divided
    if divided is not None and divided[0] == adapter:
        return make_tp_sharded_tensor_for_checkpoint(value, key, divided[1], prepend_offsets=offsets, **sharing)
    if not target.number:
        return None
    return make_sharded_tensor_for_checkpoint(value, key, prepend_offsets=offsets, **sharing)


def is_adapter(name: str) -> bool:
    """Whether a parameter of a model of either spec, or an entry of its state, is an adapter."""
    return local_name(name).endswith(ADAPTERS)


def check_adapters(source: TorchDist, models: Sequence[Any]) -> bool:
    """Whether the checkpoint `source` holds adapters. Raises ValueError when it does and the model has none."""
    stored = any(key.endswith(ADAPTERS) for key in source.names())
    if stored and not any(is_adapter(name) for model in models for name, _ in model.named_parameters()):
        raise ValueError(
            f"checkpoint {source.path} holds LoRA adapters, but lora.rank = 0: set lora.rank to that of its run"
        )
    return stored


@torch.no_grad()
def reset_adapters(models: Sequence[Any]) -> None:
    """Set B to zero, so that a model read from a checkpoint without adapters equals that checkpoint."""
    for model in models:
        for name, parameter in model.named_parameters():
            if local_name(name).endswith("lora_b"):
                parameter.zero_()
