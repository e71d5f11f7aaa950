"""TransformerKeywords: the keyword arguments of megatron's TransformerConfig that this project sets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypedDict

import torch


class TransformerKeywords(TypedDict, total=False):
    """Keyword arguments of TransformerConfig, or of MLATransformerConfig, in megatron-core 0.16.1, under its names;
    types are its types, or those of the values that this project sets. A test compares the names with megatron's."""

    # model: a family's part
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    ffn_hidden_size: int | None
    normalization: str
    layernorm_epsilon: float
    gated_linear_unit: bool
    activation_func: Callable[..., torch.Tensor]
    add_bias_linear: bool
    hidden_dropout: float
    attention_dropout: float
    init_method_std: float
    num_query_groups: int | None
    kv_channels: int | None
    qk_layernorm: bool
    add_qkv_bias: bool
    multi_latent_attention: bool
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    rope_type: str
    rotary_base: float
    rotary_scaling_factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    num_moe_experts: int | None
    moe_layer_freq: list[int]  # 0 or 1 per layer
    moe_ffn_hidden_size: int
    moe_shared_expert_intermediate_size: int | None
    moe_router_topk: int
    moe_router_score_function: Literal["softmax", "sigmoid"]
    moe_router_enable_expert_bias: bool
    moe_router_num_groups: int | None
    moe_router_group_topk: int | None
    moe_router_topk_scaling_factor: float | None
    moe_router_pre_softmax: bool
    moe_router_dtype: Literal["fp32", "fp64"] | None
    moe_router_load_balancing_type: str
    mtp_num_layers: int | None
    # layout
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int | None
    context_parallel_size: int
    expert_model_parallel_size: int
    expert_tensor_parallel_size: int | None
    sequence_parallel: bool
    num_layers_in_first_pipeline_stage: int | None
    num_layers_in_last_pipeline_stage: int | None
    overlap_p2p_comm: bool
    batch_p2p_comm: bool
    variable_seq_lengths: bool
    deallocate_pipeline_outputs: bool
    calculate_per_token_loss: bool
    # precision and determinism
    bf16: bool
    params_dtype: torch.dtype
    pipeline_dtype: torch.dtype
    autocast_dtype: torch.dtype | None
    fp8: str | None
    fp8_recipe: str | None
    fp8_param: bool
    deterministic_mode: bool
    batch_invariant_mode: bool
    attention_backend: Any  # megatron's AttnBackend
    use_cpu_initialization: bool
    perform_initialization: bool
    # kernels
    bias_activation_fusion: bool
    bias_dropout_fusion: bool
    masked_softmax_fusion: bool
    apply_rope_fusion: bool
    persist_layer_norm: bool
    gradient_accumulation_fusion: bool
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"]
    moe_flex_dispatcher_backend: Literal["deepep", "hybridep"]
    moe_grouped_gemm: bool
    moe_permute_fusion: bool
    moe_shared_expert_overlap: bool
    moe_router_fusion: bool
    # routing: what the trainer's configuration sets
    moe_enable_routing_replay: bool
    moe_aux_loss_coeff: float
    moe_router_bias_update_rate: float
    # recomputation
    recompute_granularity: Literal["full", "selective"] | None
    recompute_method: Literal["uniform", "block"] | None
    recompute_num_layers: int | None
    recompute_modules: list[str]
