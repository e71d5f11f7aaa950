"""AdamW with fp32 master weights, what it trains and decays, and gradient clipping over all ranks."""

from __future__ import annotations

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

from megatron_bridge.agree import gather
from megatron_bridge.parallel import ParallelContext
from megatron_bridge.param_names import matching, named_tensors
from megatron_bridge.resolve import Resolved


class NonFiniteGradient(RuntimeError):
    """The gradient norm is infinite or not a number; no weight was touched."""


def freeze(models: Sequence[Any], patterns: Sequence[str], parallel: ParallelContext) -> None:
    """Parameters and routing biases whose name matches are not trained. Before the gradient buffers are made;
    `models` are this rank's unwrapped chunks. Collective.

    Raises ValueError for a pattern that matches nothing, for some experts of a layer without the others (a checkpoint
    holds the optimizer's state of all experts of a layer as one tensor), or when no parameter is left to train.
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
    if not any(gather(any(p.requires_grad for model in models for p in model.parameters()))):
        raise ValueError(f"optimizer.frozen = {list(patterns)} freezes every parameter: nothing is left to train")
    keep_graph(models)


def _all_experts_or_none(models: Sequence[Any], frozen: set[int], parallel: ParallelContext) -> None:
    names = {n for n, tensor in named_tensors(models, parallel) if id(tensor) in frozen and ".local_experts." in n}
    everywhere = set().union(*gather(names))
    counts = Counter(re.sub(r"\.local_experts\.\d+\.", ".local_experts.*.", n) for n in everywhere)
    total = models[0].config.num_moe_experts
    for name, count in sorted(counts.items()):
        if count != total:
            raise ValueError(f"optimizer.frozen freezes {count} of the {total} experts in {name}: name all or none")


def _count_nothing(router: Any, args: Any, output: Any) -> None:
    """Megatron moves a routing bias by the sign of its experts' load; where nothing was counted the sign is 0."""
    router.local_tokens_per_expert.zero_()


def keep_graph(models: Sequence[Any]) -> None:
    """Let activations require a gradient from the embedding on, whatever is frozen below them.

    A recomputed layer whose input needs no gradient gives its parameters none, without any error, and a pipeline stage
    cannot run backward from an output that needs none.
    """

    def require(module: Any, args: Any, output: Tensor) -> Tensor:
        return output if output.requires_grad or not torch.is_grad_enabled() else output.requires_grad_()

    for model in models:
        if hasattr(model, "embedding"):
            model.embedding.register_forward_hook(require)


def build_optimizer(
    resolved: Resolved, chunks: Sequence[DistributedDataParallel], no_decay: Sequence[Tensor] = ()
) -> ChainedOptimizer:
    """Megatron's optimizer: dense and expert parameters chained; state sharded over data-parallel ranks when asked.

    One-dimensional parameters (norms) are not decayed, as is megatron's habit, nor are those in `no_decay`. Kinds of
    parameters that are frozen on every rank have no optimizer.
    """
    config = MegatronOptimizerConfig(**resolved.optimizer)
    _store_padding(chunks)
    for parameter in no_decay:
        parameter.no_decay = True  # type: ignore[attr-defined]
    overrides = get_standard_config_overrides(config) | {ParamKey(attr="no_decay"): ParamGroupOverride(wd_mult=0.0)}
    optimizer = get_megatron_optimizer(config, list(chunks), config_overrides=overrides)
    assert isinstance(optimizer, ChainedOptimizer)
    # a stub has no state, and megatron reads its param_groups when it saves
    parts = [o for o in optimizer.chained_optimizers if o.optimizer is not None]
    if len(parts) < len(optimizer.chained_optimizers):
        optimizer = ChainedOptimizer(parts)
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"] = True  # one pass over each parameter instead of a dozen
    return optimizer


def _store_padding(chunks: Sequence[DistributedDataParallel]) -> None:
    """Count the padding between a buffer's buckets as part of it.

    Gradients that are reduced in backward lie in several buckets, each padded so that it divides over the ranks. When
    megatron 0.16.1 gathers the state for a `fully_reshardable` checkpoint it leaves that padding out, and then cuts
    parameters from the result where they lie with it: all behind a padded bucket are stored with their neighbours'
    values, without an error. Nothing but these checkpoints reads the numbers.
    """
    for chunk in chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for bucket in buffer.buckets[:-1]:
                buffer.numel_unpadded += bucket.grad_data.numel() - bucket.numel_unpadded
                bucket.numel_unpadded = bucket.grad_data.numel()


def _torch_optimizers(optimizer: ChainedOptimizer) -> list[Any]:
    """The inner optimizers that are torch's own (TransformerEngine's FusedAdam needs none of what follows)."""
    inner = [o.optimizer for o in optimizer.chained_optimizers]
    return [o for o in inner if isinstance(o, torch.optim.AdamW)]


def prime_state(optimizer: ChainedOptimizer) -> None:
    """Give torch's AdamW the state its first step would make: megatron reads its layout before loading into it.

    Megatron also wants exactly one step number in each chained optimizer, and stores rank 0's for all. One that owns no
    parameter on this rank (the experts' on a dense pipeline stage, any on a frozen one) has none, and gets the others'.
    Collective.
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
    steps = set().union(*gather(steps))
    assert len(steps) <= 1, f"parameters have taken different numbers of steps: {sorted(steps)}"
    for adam in empty:
        adam.state["no parameters"] = {"step": torch.tensor(max(steps, default=0.0))}


@torch.no_grad()
def apply_gradients(optimizer: ChainedOptimizer, *, lr: float, clip: float) -> float:
    """Clip to `clip` by the global norm, step, and return the norm before clipping. Collective over all ranks.

    Raises NonFiniteGradient before anything is changed; every rank raises, since the norm is of all of them.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if not math.isfinite(norm):
        raise NonFiniteGradient(f"gradient norm is {norm}")
    for part in optimizer.chained_optimizers:
        if not getattr(part, "is_stub_optimizer", False) and part.get_parameters():
            clip_grad_by_total_norm_fp32(part.get_parameters(), max_norm=clip, total_norm=norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
        # megatron leaves it to its own scheduler to apply the multiplier
        group["weight_decay"] = optimizer.config.weight_decay * group["wd_mult"]
    optimizer.step_with_ready_grads()
    return norm
