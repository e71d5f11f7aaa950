"""Qwen3, dense and MoE: grouped-query attention with normed heads, softmax router.

Sources: Qwen3 report (arXiv 2505.09388), `modeling_qwen3.py` and `modeling_qwen3_moe.py` of transformers.
"""

from __future__ import annotations

from rollout.embedded.families.architecture import GroupedAttention, Moe, RouterSpec
from rollout.embedded.families.base import SIZES, Family, HFConfig, grouped, head_dim, rope_keys

_ONLY: dict[str, tuple[object, ...]] = {
    "use_sliding_window": (False, None),  # if false, sliding_window is not read
}


def _attention(config: HFConfig, default_head: int | None = None) -> GroupedAttention:
    rotary = float(rope_keys(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)
    if rotary != 1.0:
        raise ValueError(f"config.json has partial_rotary_factor = {rotary}, but Qwen3 rotates whole heads (1.0)")
    return grouped(
        config,
        head=head_dim(config, default_head),
        rotary=rotary,
        qk_norm=True,
        out_bias=bool(config.get("attention_bias", False)),
        eps=float(config.get("rms_norm_eps", 1e-6)),
    )


def _experts(config: HFConfig) -> int:
    """Number of experts; transformers 5 saves it under either name."""
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def _moe(config: HFConfig) -> Moe:
    if not _experts(config):
        raise ValueError("config.json has no num_experts: it is not a complete Qwen3-MoE configuration")
    return Moe(
        experts=_experts(config),
        router=RouterSpec(
            top_k=config["num_experts_per_tok"],
            score="softmax",
            renormalize=bool(config.get("norm_topk_prob", False)),
        ),
        ffn=config["moe_intermediate_size"],
        shared_ffn=0,
        selection_bias=False,
    )


def _moe_layers(config: HFConfig) -> tuple[int, ...]:
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return tuple(i for i in range(config["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


MOE = Family(
    name="Qwen3-MoE",
    architecture="Qwen3MoeForCausalLM",
    model_types=("qwen3_moe",),
    required=(*SIZES, "num_key_value_heads", "moe_intermediate_size", "num_experts_per_tok"),
    only=_ONLY,
    attention=_attention,
    moe=_moe,
    moe_layers=_moe_layers,
)

DENSE = Family(
    name="Qwen3",
    architecture="Qwen3ForCausalLM",
    model_types=("qwen3",),
    required=(*SIZES, "num_key_value_heads"),
    only=_ONLY,
    attention=lambda config: _attention(config, default_head=128),
    moe=lambda config: None,
    moe_layers=lambda config: (),
)
