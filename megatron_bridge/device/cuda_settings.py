"""Turns on megatron's and torch's deterministic kernels for this process: `deterministic` on CUDA ranks."""

from __future__ import annotations

import importlib

import torch
import torch.utils.deterministic

from megatron_bridge.plan.deterministic import Forward


def use_deterministic_kernels(forward: Forward) -> None:
    """From here on an operation without a deterministic torch kernel raises RuntimeError naming the operation."""
    torch.use_deterministic_algorithms(True)
    # Filling new memory only helps to find reads of uninitialized values; no summation order depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if forward == "batch invariant":
        # it imports triton, which is installed only with torch for CUDA
        kernels = importlib.import_module("megatron.core.transformer.custom_layers.batch_invariant_kernels")
        kernels.enable_batch_invariant_mode()
