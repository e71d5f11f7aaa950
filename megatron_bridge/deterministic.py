"""What `deterministic` makes of a trainer: by whose operations it computes forward, and what it then cannot do. Free of
megatron.

What is left works: docs/alignment.md has the tables. Sources for CUDA: megatron-core's `deterministic_mode` and
`batch_invariant_mode` with its batch_invariant_kernels.py (0.16.1), and its guide to deterministic training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron_bridge.config import KernelsConfig, TrainerConfig
from megatron_bridge.kernels import Spec

# stock: whatever is fast. exact: the embedded engine's operations, on CPU. deterministic: kernels of megatron and torch
# that give the same bits again. batch invariant: those, and a token's bits do not depend on the pack that it is in.
Forward = Literal["stock", "exact", "deterministic", "batch invariant"]

# Of a CUDA rank's process: what may be set, the first where nothing is. NCCL's order of adding must not be chosen anew
# from run to run, cuBLAS must not take its workspace from streams, TransformerEngine must leave atomic sums alone.
ENVIRONMENT: Mapping[str, tuple[str, ...]] = {
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def choose_forward(config: TrainerConfig, *, cuda: bool, spec: Spec, latent: bool) -> Forward:
    """latent: the model has latent attention, for whose two widths of heads megatron's flash attention has no batch
    invariant kernel. Raises ValueError, with the remedy, for a kernel or layout that does not go with it."""
    if not config.deterministic:
        return "stock"
    forward: Forward = "exact"
    if cuda:
        forward = "batch invariant" if spec == "te" and not latent else "deterministic"
    refused = _on_cpu(config) if forward == "exact" else _on_cuda(config.kernels, forward)
    if refused:
        raise ValueError(f"alignment.deterministic = true: {refused}")
    return forward


def environment(forward: Forward) -> Mapping[str, tuple[str, ...]]:
    """Of every rank: variable -> the values that it may have, the first where it is not set."""
    return ENVIRONMENT if forward in ("deterministic", "batch invariant") else {}


def _on_cpu(config: TrainerConfig) -> str:
    kernels, etp = config.kernels, config.parallel.etp
    if kernels.dispatcher != "alltoall":
        return (
            f"kernels.dispatcher = {kernels.dispatcher!r} adds experts' outputs in another order: set "
            "kernels.dispatcher = 'alltoall'"
        )
    if kernels.overlap_shared_expert:
        return "kernels.overlap_shared_expert adds the shared expert's output elsewhere: set it to false"
    if not kernels.swiglu_fusion:
        return "kernels.swiglu_fusion = false rounds elsewhere than the engine: set it to true"
    if etp > 2:
        return (
            f"parallel.etp = {etp}: shares of more than 2 ranks are added in no fixed order; set it to 2 or spread the "
            "experts by parallel.ep"
        )
    return ""


def _on_cuda(kernels: KernelsConfig, forward: Forward) -> str:
    if kernels.dispatcher == "flex":
        return (
            f"nothing is known of the order in which kernels.flex_backend = {kernels.flex_backend!r} adds: set "
            "kernels.dispatcher = 'alltoall'"
        )
    if forward == "batch invariant" and kernels.fp8 != "none":
        return (
            f"megatron's batch invariant products are of 16 and 32 bits, kernels.fp8 = {kernels.fp8!r}: set it to "
            "'none'"
        )
    if forward == "batch invariant" and kernels.grouped_gemm:
        return "kernels.grouped_gemm = true: megatron has no batch invariant grouped product: set it to false"
    return ""
