"""Checks of kernels and overlaps, and megatron's keyword arguments for them. Imports no megatron.

A key that would have no effect on this device, in this layout or for this model is an error.
"""

from __future__ import annotations

import math
from typing import Literal

from megatron_bridge.config import KernelsConfig, TrainerConfig
from megatron_bridge.families.base import HFConfig, Split
from megatron_bridge.families.keywords import TransformerKeywords
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.keywords import DdpKeywords, OptimizerKeywords

Spec = Literal["local", "te"]
Capability = tuple[int, int]  # CUDA compute capability (major, minor)

CAPABILITIES: dict[str, Capability] = {  # that recipes of FP8 need
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
# A linear's inputs on a rank are a multiple of the block that TransformerEngine's Float8BlockScaling or
# MXFP8BlockScaling scales.
_BLOCK = {"delayed": 16, "tensorwise": 16, "blockwise": 128, "mxfp8": 32}
# The rows of an FP8 matrix product are a multiple of this: get_fp8_align_size of megatron's fp8_utils.
_ROWS = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}


def choose_spec(
    config: TrainerConfig, hf: HFConfig, *, cuda: bool, te: bool, capability: Capability | None = None
) -> Spec:
    """The module implementation to build the model from: megatron's local modules or TransformerEngine's.

    `te`: TransformerEngine is installed. `capability`: of the rank's device; None skips the checks that need it. Raises
    ValueError, with the remedy, for settings that cannot work here or have no effect.
    """
    kernels = config.kernels
    if kernels.spec == "te" and not (cuda and te):
        missing = "a CUDA device" if not cuda else "the package transformer-engine-torch"
        raise ValueError(f"kernels.spec = 'te' needs {missing} on every trainer rank: set kernels.spec = 'auto'")
    local = config.precision.activations != "none"  # only local modules round their inputs like the rollout
    spec: Spec = "te" if kernels.spec in (("te",) if local else ("te", "auto")) and cuda and te else "local"
    if not cuda:
        _refuse_without_cuda(kernels)
    if spec == "local":
        _refuse_without_te(kernels)
    elif config.lora.rank and kernels.fp8 != "none":
        raise ValueError(
            f"lora.rank = {config.lora.rank} cannot be combined with kernels.fp8 = {kernels.fp8!r}, which keeps "
            "rounded weights between micro-batches: set kernels.fp8 = 'none' or lora.rank = 0"
        )
    if spec == "te":
        _refuse_biases(hf)
    _refuse_fp8(config, hf, capability)
    _refuse_experts(config, family_of(hf).transformer_config(hf))
    _refuse_overlap(config)
    if kernels.rope_fusion:
        rope = family_of(hf).transformer_config(hf).get("rope_type")
        if rope is not None and rope != "yarn":
            raise ValueError(
                "kernels.rope_fusion = true: with latent attention megatron fuses only yarn, but the model has "
                f"rope type {rope!r}; set it to false"
            )
    return spec


def _refuse_without_cuda(kernels: KernelsConfig) -> None:
    asked = {
        "fp8": kernels.fp8 != "none",
        "grouped_gemm": kernels.grouped_gemm,
        "dispatcher = 'flex'": kernels.dispatcher == "flex",
        "offload_optimizer": kernels.offload_optimizer > 0,
        "rope_fusion": kernels.rope_fusion,
        "permute_fusion": kernels.permute_fusion,
    }
    if given := [name for name, on in asked.items() if on]:
        raise ValueError(f"kernels.{given[0]} needs CUDA devices, but this run has CPU ranks: remove it")


def _refuse_without_te(kernels: KernelsConfig) -> None:
    asked = {
        f"fp8 = {kernels.fp8!r}": kernels.fp8 != "none",
        "grouped_gemm": kernels.grouped_gemm,
        "rope_fusion": kernels.rope_fusion,
        "permute_fusion": kernels.permute_fusion,
    }
    if given := [name for name, on in asked.items() if on]:
        raise ValueError(
            f"kernels.{given[0]} needs TransformerEngine's modules, but this run uses megatron's local ones: "
            "install transformer-engine and set kernels.spec = 'te', or remove it"
        )


def _refuse_biases(hf: HFConfig) -> None:
    """megatron builds only the bias of `linear_qkv`; `biases` adds others, but only to local modules."""
    if other := sorted(family_of(hf).bind(hf).biased - {"self_attention.linear_qkv"}):
        raise ValueError(
            f"config.json: attention_bias requires a bias in {other[0]}, which megatron's TransformerEngine "
            "modules do not support: set kernels.spec = 'local'"
        )


def _refuse_fp8(config: TrainerConfig, hf: HFConfig, capability: Capability | None) -> None:
    kernels, recipe = config.kernels, config.kernels.fp8
    if recipe == "none":
        if kernels.fp8_format != "e4m3" or kernels.fp8_param_gather:
            raise ValueError(
                "kernels.fp8_format and fp8_param_gather have no effect with kernels.fp8 = 'none': remove them"
            )
        return
    need = CAPABILITIES[recipe]
    if capability is not None and capability < need:
        raise ValueError(
            f"kernels.fp8 = {recipe!r} needs compute capability {need[0]}.{need[1]}, but the device has "
            f"{capability[0]}.{capability[1]}: choose another recipe, or 'none'"
        )
    if config.params_dtype != "bfloat16":
        raise ValueError(
            f"kernels.fp8 = {recipe!r} needs params_dtype = 'bfloat16', but it is {config.params_dtype!r}: set "
            "kernels.fp8 = 'none', or params_dtype = 'bfloat16'"
        )
    if recipe in ("blockwise", "mxfp8") and kernels.fp8_format != "e4m3":
        raise ValueError(f"kernels.fp8 = {recipe!r} supports only e4m3: set kernels.fp8_format = 'e4m3'")
    for name, outputs, inputs in _linears(config, hf):
        for what, size in (("inputs", inputs), ("outputs", outputs)):
            block = _BLOCK[recipe] if what == "inputs" else _ROWS[recipe]
            if size % block:
                raise ValueError(
                    f"kernels.fp8 = {recipe!r} needs a multiple of {block}, but {name} has {size} {what} on a "
                    f"rank (parallel.tp = {config.parallel.tp}, etp = {config.parallel.etp}): choose another "
                    "recipe or layout"
                )
    if kernels.fp8_param_gather:
        if not config.distributed_optimizer:
            raise ValueError(
                "kernels.fp8_param_gather needs distributed_optimizer = true, but it is false: set it to true"
            )
        if kernels.offload_optimizer > 0:
            raise ValueError(
                "kernels.fp8_param_gather cannot be combined with kernels.offload_optimizer = "
                f"{kernels.offload_optimizer}: remove one of them"
            )
        if recipe == "mxfp8":
            raise ValueError("kernels.fp8_param_gather with kernels.fp8 = 'mxfp8' is not supported: set it to false")


def _linears(config: TrainerConfig, hf: HFConfig) -> list[tuple[str, int, int]]:
    """(parameter name pattern, outputs, inputs) on one rank of every linear that would run in FP8."""
    tensors, found = family_of(hf).bind(hf), []
    for entry in tensors.entries:
        if not entry.linear:
            continue
        outputs, inputs = tensors.megatron_shape(entry)
        ranks = config.parallel.etp if entry.per_expert else config.parallel.tp
        if entry.split is Split.ROW:
            inputs //= ranks
        elif entry.split is not Split.REPLICATED:
            outputs //= ranks
        found.append((entry.megatron, outputs, inputs))
    return found


def _refuse_experts(config: TrainerConfig, architecture: TransformerKeywords) -> None:
    kernels, layout = config.kernels, config.parallel
    if kernels.flex_backend != "deepep" and kernels.dispatcher != "flex":
        raise ValueError(
            f"kernels.flex_backend = {kernels.flex_backend!r} has no effect with kernels.dispatcher = "
            f"{kernels.dispatcher!r}: remove it or set kernels.dispatcher = 'flex'"
        )
    if architecture.get("num_moe_experts") is None:
        moe = kernels.grouped_gemm or kernels.permute_fusion or kernels.overlap_shared_expert
        if moe or kernels.dispatcher != "alltoall":
            raise ValueError(
                "kernels.grouped_gemm, permute_fusion, overlap_shared_expert and dispatcher apply to experts, "
                "but the model has none: remove them"
            )
        return
    if kernels.overlap_shared_expert:
        if not architecture.get("moe_shared_expert_intermediate_size"):
            raise ValueError("kernels.overlap_shared_expert = true, but the model has no shared expert: remove it")
        if kernels.dispatcher != "alltoall":
            raise ValueError(
                "kernels.overlap_shared_expert requires kernels.dispatcher = 'alltoall', but it is "
                f"{kernels.dispatcher!r}: set overlap_shared_expert = false"
            )
    if kernels.dispatcher == "flex" and layout.ep * layout.etp == 1:
        raise ValueError(
            "kernels.dispatcher = 'flex' needs parallel.ep * etp > 1, but it is 1: raise parallel.ep or set "
            "kernels.dispatcher = 'alltoall'"
        )
    # It gathers the same number of tokens from every rank, so the ranks must hold slices of one pack.
    one_pack = layout.pp == 1 and (layout.tp * layout.cp) % (layout.ep * layout.etp) == 0
    if kernels.dispatcher == "allgather" and not one_pack:
        raise ValueError(
            f"kernels.dispatcher = 'allgather' needs parallel.pp = 1 and parallel.ep * etp dividing tp * cp, since "
            f"packs differ in length; here pp = {layout.pp}, ep * etp = {layout.ep * layout.etp}, tp * cp = "
            f"{layout.tp * layout.cp}: set kernels.dispatcher = 'alltoall'"
        )


def _refuse_overlap(config: TrainerConfig) -> None:
    kernels = config.kernels
    if kernels.overlap_param_gather and not (config.distributed_optimizer and kernels.overlap_grad_reduce):
        raise ValueError(
            f"kernels.overlap_param_gather needs distributed_optimizer (it is {config.distributed_optimizer}) and "
            f"kernels.overlap_grad_reduce (it is {kernels.overlap_grad_reduce}): set both to true"
        )
    if kernels.offload_optimizer > 0 and not config.distributed_optimizer:
        raise ValueError(
            f"kernels.offload_optimizer = {kernels.offload_optimizer} needs distributed_optimizer = true, but "
            "it is false: set it to true"
        )


def token_multiple(config: TrainerConfig) -> int:
    """The number of rows in a tensor- and context-parallel rank's slice of a pack must be a multiple of this."""
    return 1 if config.kernels.fp8 == "none" else _ROWS[config.kernels.fp8]


def transformer_arguments(config: TrainerConfig, *, experts: bool) -> TransformerKeywords:
    """Keyword arguments for TransformerConfig; fusions without a config key are off."""
    kernels = config.kernels
    out: TransformerKeywords = {
        "bias_activation_fusion": kernels.swiglu_fusion,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": kernels.rope_fusion,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        # also without experts: megatron's default, allgather, excludes packs of different lengths
        "moe_token_dispatcher_type": kernels.dispatcher,
    }
    if kernels.fp8 != "none":
        out |= {"fp8": kernels.fp8_format, "fp8_recipe": kernels.fp8, "fp8_param": kernels.fp8_param_gather}
    if experts:
        out |= {
            "moe_grouped_gemm": kernels.grouped_gemm,
            "moe_permute_fusion": kernels.permute_fusion,
            "moe_shared_expert_overlap": kernels.overlap_shared_expert,
            "moe_router_fusion": False,  # TransformerEngine's fused router does not call the replay hook
            "moe_router_dtype": "fp32",  # DeepEP accepts fp32 routing weights
        }
        if kernels.dispatcher == "flex":
            out["moe_flex_dispatcher_backend"] = kernels.flex_backend
        if kernels.dispatcher == "allgather":
            out["variable_seq_lengths"] = False  # lengths are only exchanged between pipeline stages
    return out


def ddp_arguments(config: TrainerConfig) -> DdpKeywords:
    """Keyword arguments for DistributedDataParallelConfig."""
    kernels = config.kernels
    out: DdpKeywords = {
        "use_distributed_optimizer": config.distributed_optimizer,
        "grad_reduce_in_fp32": True,
        "bucket_size": None,  # megatron's default when gradients are reduced during backward
        "overlap_grad_reduce": kernels.overlap_grad_reduce,
        "overlap_param_gather": kernels.overlap_param_gather,
    }
    if kernels.overlap_param_gather:
        out["align_param_gather"] = config.parallel.vpp > 1
    if kernels.fp8 != "none":
        out["fp8_param_gather"] = kernels.fp8_param_gather
    return out


def optimizer_arguments(config: TrainerConfig) -> OptimizerKeywords:
    """Keyword arguments for megatron's OptimizerConfig."""
    kernels = config.kernels
    out: OptimizerKeywords = {"overlap_param_gather": kernels.overlap_param_gather}
    if kernels.fp8 != "none":
        out["fp8_recipe"] = kernels.fp8
    if kernels.offload_optimizer > 0:
        out |= {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": kernels.offload_optimizer,
            "overlap_cpu_optimizer_d2h_h2d": True,
        }
    return out


def describe_kernels(config: TrainerConfig, spec: Spec) -> str:
    """One line for a dry run."""
    kernels = config.kernels
    fp8 = "bf16" if kernels.fp8 == "none" else f"fp8 {kernels.fp8} {kernels.fp8_format}"
    dispatcher = f"flex ({kernels.flex_backend})" if kernels.dispatcher == "flex" else kernels.dispatcher
    on = [
        name
        for name in (
            "grouped_gemm",
            "rope_fusion",
            "permute_fusion",
            "overlap_grad_reduce",
            "overlap_param_gather",
            "overlap_shared_expert",
        )
        if getattr(kernels, name)
    ]
    if kernels.offload_optimizer > 0:
        on.append(f"{math.ceil(100 * kernels.offload_optimizer)} % of the optimizer on the host")
    modules = "TransformerEngine" if spec == "te" else "local"
    return f"kernels: {modules} modules, {fp8}, {dispatcher} dispatcher" + "".join(f", {name}" for name in on)
