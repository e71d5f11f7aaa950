"""Translates a trainer's configuration into the keyword arguments of megatron's config classes.

Imports no megatron and needs no CUDA: a cluster's settings can be computed and checked on a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_bridge.config import TrainerConfig
from megatron_bridge.families.base import HFConfig, is_scalar
from megatron_bridge.families.keywords import TransformerKeywords
from megatron_bridge.families.registry import family_of, with_scalar_head
from megatron_bridge.plan.deterministic import Forward, choose_forward
from megatron_bridge.plan.kernels import (
    Capability,
    Spec,
    choose_spec,
    ddp_arguments,
    optimizer_arguments,
    token_multiple,
    transformer_arguments,
)
from megatron_bridge.plan.keywords import DdpKeywords, OptimizerKeywords
from megatron_bridge.plan.precision import check_precision
from megatron_bridge.plan.recompute import recompute_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Settings from which one rank is built; dictionaries are keyword arguments of megatron's classes."""

    spec: Spec  # module implementation
    forward: Forward  # forward implementation
    multi_latent_attention: bool  # MLATransformerConfig rather than TransformerConfig
    transformer: TransformerKeywords
    ddp: DdpKeywords
    optimizer: OptimizerKeywords
    token_multiple: int  # rows of a rank's slice of a pack are a multiple of this


def trained_config(config: TrainerConfig, hf: HFConfig) -> HFConfig:
    """The config.json of the model that a rank trains, which has the head that `config` names. Raises ValueError for a
    scalar model with head = "lm"."""
    if config.head == "scalar":
        return with_scalar_head(hf)
    if is_scalar(hf):
        raise ValueError(
            f"{config.hf_config}: config.json has architectures = {hf['architectures']}, which has no vocabulary "
            "head: set head = 'scalar', or use a language model"
        )
    return hf


def resolve(
    config: TrainerConfig, hf: HFConfig, *, cuda: bool, te: bool = False, capability: Capability | None = None
) -> Resolved:
    """The family's keywords plus everything that layout, precision, kernels and device determine.

    `te`: TransformerEngine is installed; `capability`: of the device, None without one. Raises ValueError for a model
    that its family cannot train, for kernels that this device, layout or model cannot use, for settings that a
    deterministic trainer excludes, and for quantization-aware training that would not round like the rollout.
    """
    spec = choose_spec(config, hf, cuda=cuda, te=te, capability=capability)
    check_precision(config, hf, te=spec == "te")
    dtype = torch.bfloat16 if config.params_dtype == "bfloat16" else torch.float32
    family = family_of(hf).transformer_config(hf)
    latent = bool(family.get("multi_latent_attention"))
    forward = choose_forward(config, cuda=cuda, spec=spec, latent=latent)
    transformer = family | _layout(config) | _precision(dtype)
    transformer["deterministic_mode"] = forward in ("deterministic", "batch invariant")
    if config.router_bias_update_rate and not family.get("moe_router_enable_expert_bias"):
        raise ValueError(
            f"router_bias_update_rate = {config.router_bias_update_rate}, but this model has no router with a "
            "selection bias: set it to 0"
        )
    experts = family.get("num_moe_experts") is not None
    if experts:
        transformer |= _moe(config)
    else:
        _no_experts(config)
    transformer |= {"use_cpu_initialization": not cuda} | transformer_arguments(config, experts=experts)
    transformer |= _mtp(config, hf)
    transformer |= recompute_settings(config, transformer)
    return Resolved(
        spec=spec,
        forward=forward,
        multi_latent_attention=latent,
        transformer=transformer,
        ddp=ddp_arguments(config),
        optimizer=_optimizer(config, dtype) | optimizer_arguments(config),
        token_multiple=token_multiple(config),
    )


def _layout(config: TrainerConfig) -> TransformerKeywords:
    layout = config.parallel
    out: TransformerKeywords = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        # megatron requires it for tensor parallelism with experts
        "sequence_parallel": layout.tp > 1,
        "num_layers_in_first_pipeline_stage": layout.first_stage_layers,
        "num_layers_in_last_pipeline_stage": layout.last_stage_layers,
        "variable_seq_lengths": True,  # packs differ in length
        "calculate_per_token_loss": True,  # gradients are sums; the step divides once, by the whole batch's tokens
        "deallocate_pipeline_outputs": False,
    }
    if layout.vpp > 1:
        out |= {
            "virtual_pipeline_model_parallel_size": layout.vpp,
            # With two stages a batched exchange contains two sends to the same peer, and the received tensors are
            # swapped without an error: loss and gradients are wrong (megatron-core 0.16.1 does not check this).
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    return out


def _precision(dtype: torch.dtype) -> TransformerKeywords:
    return {
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
    }


def _moe(config: TrainerConfig) -> TransformerKeywords:
    return {
        "moe_enable_routing_replay": True,
        "moe_router_load_balancing_type": "aux_loss" if config.router_aux_loss else "none",
        "moe_aux_loss_coeff": config.router_aux_loss,  # router.py corrects its scale
        "moe_router_bias_update_rate": config.router_bias_update_rate,
    }


def _no_experts(config: TrainerConfig) -> None:
    """Raise ValueError for a key that only affects routers. replay.mode = "r3", the default, is allowed: a dense model
    has nothing to replay."""
    if config.router_aux_loss:
        raise ValueError(f"train.router_aux_loss = {config.router_aux_loss}, but the model has no experts: set it to 0")
    if config.replay.gates:
        raise ValueError("replay.gates = true, but the model has no experts: set it to false")
    if config.replay.mode == "r2":
        raise ValueError("replay.mode = 'r2', but the model has no experts to replay: set it to 'off'")


def _mtp(config: TrainerConfig, hf: HFConfig) -> TransformerKeywords:
    if not config.mtp_coefficient:
        return {}
    depths = family_of(hf).mtp_layers(hf)
    if not depths:
        raise ValueError(
            f"mtp_coefficient = {config.mtp_coefficient}, but config.json has num_nextn_predict_layers = 0: set it to 0"
        )
    if hf.get("tie_word_embeddings") and config.parallel.pp > 1:
        raise ValueError(
            f"mtp_coefficient = {config.mtp_coefficient} with tie_word_embeddings and parallel.pp = "
            f"{config.parallel.pp}: megatron-core cannot save a last stage that holds the embedding for both; "
            "set parallel.pp = 1 or mtp_coefficient = 0"
        )
    return {"mtp_num_layers": depths}


def _optimizer(config: TrainerConfig, dtype: torch.dtype) -> OptimizerKeywords:
    own = config.optimizer
    return {
        "optimizer": "adam",
        "lr": own.lr,
        "min_lr": own.min_lr,
        "weight_decay": own.weight_decay,
        "adam_beta1": own.beta1,
        "adam_beta2": own.beta2,
        "adam_eps": own.eps,
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": config.distributed_optimizer,
        "clip_grad": own.clip_grad,
    }
