"""The forward implementation that `deterministic` selects, and the settings that it excludes. Imports no megatron.

docs/alignment.md has the tables. Sources for CUDA: megatron-core's `deterministic_mode` and `batch_invariant_mode`
with its batch_invariant_kernels.py (0.16.1), and its guide to deterministic training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from megatron_bridge.config import KernelsConfig, TrainerConfig
from megatron_bridge.plan.kernels import Spec

# stock: the fastest kernels. exact: the embedded engine's operations, on CPU. deterministic: kernels of megatron and
# torch with reproducible bits. batch invariant: also, a token's bits do not depend on the other tokens of its pack.
Forward = Literal["stock", "exact", "deterministic", "batch invariant"]

# Environment variables of a CUDA rank and their allowed values; the first is the default. NCCL's summation order must
# not vary between runs, cuBLAS must not use per-stream workspaces, TransformerEngine must not use atomic sums.
ENVIRONMENT: Mapping[str, tuple[str, ...]] = {
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}


def choose_forward(config: TrainerConfig, *, cuda: bool, spec: Spec, latent: bool) -> Forward:
    """The forward implementation of a trainer. latent: the model has latent attention, for whose two head sizes
    megatron's flash attention has no batch-invariant kernel. Raises ValueError, with the remedy, for a kernel or layout
    that `deterministic` excludes."""
    if not config.deterministic:
        return "stock"
    forward: Forward = "exact"
    if cuda:
        forward = "batch invariant" if spec == "te" and not latent else "deterministic"
    conflict = _cpu_conflict(config) if forward == "exact" else _cuda_conflict(config.kernels, forward)
    if conflict:
        raise ValueError(f"alignment.deterministic = true: {conflict}")
    return forward


def environment(forward: Forward) -> Mapping[str, tuple[str, ...]]:
    """Environment variable of a rank -> its allowed values; the first is the default."""
    return ENVIRONMENT if forward in ("deterministic", "batch invariant") else {}


def _cpu_conflict(config: TrainerConfig) -> str:
    kernels, etp = config.kernels, config.parallel.etp
    if kernels.dispatcher != "alltoall":
        return (
            f"kernels.dispatcher = {kernels.dispatcher!r} adds the experts' outputs in a different order: set "
            "kernels.dispatcher = 'alltoall'"
        )
    if kernels.overlap_shared_expert:
        return (
            "kernels.overlap_shared_expert = true adds the shared expert's output in a different order: set it to false"
        )
    if not kernels.swiglu_fusion:
        return "kernels.swiglu_fusion = false does not round like the engine: set it to true"
    if etp > 2:
        return (
            f"parallel.etp = {etp}: partial sums of more than 2 ranks are not added in a fixed order; set it to "
            "2, or distribute the experts with parallel.ep"
        )
    return ""


def _cuda_conflict(kernels: KernelsConfig, forward: Forward) -> str:
    if kernels.dispatcher == "flex":
        return (
            f"the order in which kernels.flex_backend = {kernels.flex_backend!r} adds is unknown: set "
            "kernels.dispatcher = 'alltoall'"
        )
    if forward == "batch invariant" and kernels.fp8 != "none":
        return (
            f"megatron's batch-invariant products support 16 and 32 bits only, but kernels.fp8 = {kernels.fp8!r}: "
            "set it to 'none'"
        )
    if forward == "batch invariant" and kernels.grouped_gemm:
        return "kernels.grouped_gemm = true, but megatron has no batch-invariant grouped product: set it to false"
    return ""
