"""AdamW with fp32 master weights, gradient clipping over all ranks, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

from megatron_bridge.config import OptimizerConfig
from megatron_bridge.resolve import Resolved


class NonFiniteGradient(RuntimeError):
    """The gradient norm is infinite or not a number; no weight was touched."""


def build_optimizer(resolved: Resolved, chunks: Sequence[DistributedDataParallel]) -> ChainedOptimizer:
    """Megatron's optimizer: dense and expert parameters chained; state sharded over data-parallel ranks when asked.

    One-dimensional parameters (norms) are not decayed, as is megatron's habit.
    """
    optimizer = get_megatron_optimizer(MegatronOptimizerConfig(**resolved.optimizer), list(chunks))
    assert isinstance(optimizer, ChainedOptimizer)
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            group["fused"] = True  # one pass over each parameter instead of a dozen
    return optimizer


def _torch_optimizers(optimizer: ChainedOptimizer) -> list[Any]:
    """The inner optimizers that are torch's own (TransformerEngine's FusedAdam needs none of what follows)."""
    inner = [o.optimizer for o in optimizer.chained_optimizers]
    return [o for o in inner if isinstance(o, torch.optim.AdamW)]


def prime_state(optimizer: ChainedOptimizer) -> None:
    """Give torch's AdamW the state its first step would make: megatron reads its layout before loading into it.

    Megatron also wants exactly one step number in each chained optimizer. One that owns no parameter on this rank (the
    experts' on a dense pipeline stage) has none, and gets its siblings'.
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
    assert len(steps) <= 1, f"parameters of one rank have taken different numbers of steps: {sorted(steps)}"
    for adam in empty:
        adam.state["no parameters"] = {"step": torch.tensor(max(steps, default=0.0))}


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Of the step with number `step` (from 0): linear from min_lr to lr over warmup_steps, then lr."""
    if step >= config.warmup_steps:
        return config.lr
    return config.min_lr + (config.lr - config.min_lr) * (step + 1) / config.warmup_steps


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
    optimizer.step_with_ready_grads()
    return norm
