"""Megatron's and torch's own deterministic kernels, for good in this process: `deterministic` on CUDA ranks."""

from __future__ import annotations

import importlib

import torch
import torch.utils.deterministic

from megatron_bridge.deterministic import Forward


def use_deterministic_kernels(forward: Forward) -> None:
    """An operation that torch has no deterministic kernel for then raises RuntimeError, naming itself."""
    torch.use_deterministic_algorithms(True)
    # Filling what is not written yet is for finding reads of it: no sum's order depends on that.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if forward == "batch invariant":
        # it imports triton, which torch brings along on CUDA only
        kernels = importlib.import_module("megatron.core.transformer.custom_layers.batch_invariant_kernels")
        kernels.enable_batch_invariant_mode()
