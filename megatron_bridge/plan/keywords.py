"""Keyword arguments of megatron's DistributedDataParallelConfig and OptimizerConfig that this project sets.

Names and types are those of megatron-core 0.16.1; a test compares the names with megatron's fields.
"""

from __future__ import annotations

from typing import TypedDict

import torch


class DdpKeywords(TypedDict, total=False):
    """Keyword arguments of DistributedDataParallelConfig."""

    use_distributed_optimizer: bool
    grad_reduce_in_fp32: bool
    bucket_size: int | None
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    align_param_gather: bool
    fp8_param_gather: bool


class OptimizerKeywords(TypedDict, total=False):
    """Keyword arguments of megatron's OptimizerConfig."""

    optimizer: str
    lr: float | None
    min_lr: float | None
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    bf16: bool
    params_dtype: torch.dtype
    use_distributed_optimizer: bool
    clip_grad: float
    overlap_param_gather: bool
    fp8_recipe: str | None
    optimizer_cpu_offload: bool
    optimizer_offload_fraction: float
    overlap_cpu_optimizer_d2h_h2d: bool
    use_precision_aware_optimizer: bool
