"""AdamW with fp32 master weights: frozen and undecayed parameters, and gradient clipping over all ranks."""

from __future__ import annotations

import gc
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer_config import ParamKey
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_bridge.device.collective_errors import gather_objects
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.optim.param_names import matching, named_tensors
from megatron_bridge.plan.resolve import Resolved


class NonFiniteGradient(RuntimeError):
    """The gradient norm is infinite or not a number; no weight has changed."""


def freeze(models: Sequence[Any], patterns: Sequence[str], parallel: ParallelContext) -> None:
    """Freeze the parameters and routing biases whose names match. Call it before the gradient buffers are made;
    `models` are this rank's unwrapped chunks. Collective.

    Raises ValueError for a pattern that matches nothing, for only some experts of a layer (a checkpoint holds the
    optimizer's state of all experts of a layer as one tensor), or when no parameter is left to train.
    """
    if not patterns:
        return
    frozen = {id(tensor) for tensor in matching(models, parallel, patterns, key="optimizer.frozen")}
    _all_experts_or_none(models, frozen, parallel)
    for model in models:
        for parameter in model.parameters():
            if id(parameter) in frozen:
                parameter.requires_grad_(False)
        for router in model.modules():
            if isinstance(router, TopKRouter) and id(router.expert_bias) in frozen:
                router.register_forward_hook(_count_nothing)
    if not any(gather_objects(any(p.requires_grad for model in models for p in model.parameters()))):
        raise ValueError(
            f"optimizer.frozen = {list(patterns)} freezes all parameters, so nothing can be trained: remove patterns"
        )
    keep_graph(models)


def _all_experts_or_none(models: Sequence[Any], frozen: set[int], parallel: ParallelContext) -> None:
    names = {n for n, tensor in named_tensors(models, parallel) if id(tensor) in frozen and ".local_experts." in n}
    everywhere = set().union(*gather_objects(names))
    counts = Counter(re.sub(r"\.local_experts\.\d+\.", ".local_experts.*.", n) for n in everywhere)
    total = models[0].config.num_moe_experts
    for name, count in sorted(counts.items()):
        if count != total:
            raise ValueError(f"optimizer.frozen freezes {count} of the {total} experts in {name}: freeze all or none")


def _count_nothing(router: Any, args: Any, output: Any) -> None:
    """Reset the load, by whose sign megatron updates the routing bias; the sign of zero load is 0."""
    router.local_tokens_per_expert.zero_()


def keep_graph(models: Sequence[Any]) -> None:
    """Make the embedding's output require a gradient even if everything below is frozen.

    A recomputed layer whose input requires no gradient gives its parameters none and raises no error, and a pipeline
    stage cannot run backward from an output that requires none.
    """

    def require(module: Any, args: Any, output: Tensor) -> Tensor:
        return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_()

    for model in models:
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(require)


def build_optimizer(
    resolved: Resolved, chunks: Sequence[DistributedDataParallel], no_decay: Sequence[Tensor] = ()
) -> ChainedOptimizer:
    """Megatron's optimizer: dense and expert parameters chained; state sharded over data-parallel ranks if configured.

    One-dimensional parameters (norms) are not decayed, as by default in megatron, nor are those in `no_decay`. A kind
    of parameters that is frozen on every rank has no optimizer.
    """
    config = MegatronOptimizerConfig(**resolved.optimizer)
    if config.optimizer_cpu_offload:
        _keep_masters_on_host(config)
    _store_padding(chunks)
    for parameter in no_decay:
        parameter.no_decay = True  # type: ignore[attr-defined]
    overrides = get_standard_config_overrides(config) | {ParamKey(attr="no_decay"): ParamGroupOverride(wd_mult=0.0)}
    optimizer = get_megatron_optimizer(config, list(chunks), config_overrides=overrides)
    assert isinstance(optimizer, ChainedOptimizer)
    # a stub has no state, and megatron reads its param_groups when it saves
    training = [o for o in optimizer.chained_optimizers if o.optimizer is not None]
    if len(training) < len(optimizer.chained_optimizers):
        optimizer = ChainedOptimizer(training)
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"] = True  # one pass over each parameter instead of about a dozen
    if config.optimizer_cpu_offload:
        gc.collect()  # megatron first builds one over unsharded parameters, whose masters live on in a cycle
    return optimizer


def _keep_masters_on_host(config: MegatronOptimizerConfig) -> None:
    """Hand `HybridDeviceOptimizer` the BF16 shards instead of FP32 masters on the device.

    With masters on the device, each has a copy on the host beside it, and loading weights sets neither
    (megatron-core 0.16.1, `update_fp32_param_by_new_param`): the first step would replace the loaded weights by the
    random ones. Megatron-LM's arguments require this too. Set here and not as an argument, because the constructor
    compares the version of TransformerEngine, which need not be installed.
    """
    config.use_precision_aware_optimizer = True
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True


def _store_padding(chunks: Sequence[DistributedDataParallel]) -> None:
    """Count the padding between a buffer's buckets as part of the buffer.

    Gradients that are reduced during backward lie in several buckets, each padded to divide over the ranks. When
    megatron 0.16.1 gathers the state for a `fully_reshardable` checkpoint it omits that padding, but slices parameters
    at offsets that include it: all parameters after a padded bucket are stored with their neighbours' values, without
    an error. Only these checkpoints read the changed numbers.
    """
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets[:-1]:
                buffer.numel_unpadded += bucket.grad_data.numel() - bucket.numel_unpadded
                bucket.numel_unpadded = bucket.grad_data.numel()


def _torch_optimizers(optimizer: ChainedOptimizer) -> list[Any]:
    """The inner optimizers that are torch's AdamW (TransformerEngine's FusedAdam needs none of these adjustments)."""
    inner = [o.optimizer for o in optimizer.chained_optimizers]
    return [o for o in inner if isinstance(o, torch.optim.AdamW)]


def prime_state(optimizer: ChainedOptimizer) -> None:
    """Create the state of torch's AdamW that its first step would create: megatron reads its layout before loading.

    Megatron also expects exactly one step number in each chained optimizer, and stores rank 0's for all. An optimizer
    without parameters on this rank (the experts' on a dense pipeline stage, any on a frozen stage) has none, and gets
    that of the others. Collective.
    """
    inner = _torch_optimizers(optimizer)
    for adam in inner:
        for group in adam.param_groups:
            for p in group["params"]:
                if not adam.state[p]:
                    adam.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device=p.device),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
    empty = [adam for adam in inner if not any(group["params"] for group in adam.param_groups)]
    steps = {float(state["step"]) for adam in inner if adam not in empty for state in adam.state.values()}
    steps = set().union(*gather_objects(steps))
    assert len(steps) <= 1, f"parameters have taken different numbers of steps: {sorted(steps)}"
    for adam in empty:
        adam.state["no parameters"] = {"step": torch.tensor(max(steps, default=0.0))}


def complete_groups(optimizer: ChainedOptimizer) -> None:
    """Give each parameter group the settings that its optimizer reads and a loaded checkpoint lacks, at their defaults.

    Groups are stored as the optimizer that wrote them has them: torch's AdamW, of local modules, has no
    `bias_correction`, without which TransformerEngine's FusedAdam ends its first step in a KeyError.
    """
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups if part.optimizer is not None else ():
            for name, value in part.optimizer.defaults.items():
                group.setdefault(name, value)


@torch.no_grad()
def apply_gradients(optimizer: ChainedOptimizer, *, lr: float, clip: float) -> float:
    """Clip to `clip` by the global norm, step, and return the norm before clipping. Collective over all ranks.

    Raises NonFiniteGradient on every rank, since the norm is global, before anything has changed.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise NonFiniteGradient(f"gradient norm is {norm}")
    for part in optimizer.chained_optimizers:
        if not getattr(part, "is_stub_optimizer", False) and part.get_parameters():
            # with an optimizer on the host gradients are views of the buffer, beside parameters of another dtype
            apart = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
            clip_grad_by_total_norm_fp32(part.get_parameters(), clip, norm, use_decoupled_grad=apart)
    for group in optimizer.param_groups:
        group["lr"] = lr
        # megatron applies the multiplier only in its scheduler
        group["weight_decay"] = optimizer.config.weight_decay * group["wd_mult"]
    optimizer.step_with_ready_grads()
    return norm
