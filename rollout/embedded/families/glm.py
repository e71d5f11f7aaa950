"""GLM-4.5 (MoE): grouped-query attention, half of a head rotated, DeepSeek-V3's router and shared expert.

Sources: GLM-4.5 report (arXiv 2508.06471), `modeling_glm4_moe.py` of transformers.
"""

from __future__ import annotations

from rollout.embedded.families.architecture import GroupedAttention
from rollout.embedded.families.base import (
    SIGMOID_MOE,
    SIZES,
    Family,
    HFConfig,
    after_first_dense,
    grouped,
    head_dim,
    rope_keys,
    sigmoid_moe,
)


def _attention(config: HFConfig) -> GroupedAttention:
    rotary = rope_keys(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.5
    return grouped(
        config,
        head=head_dim(config),
        rotary=float(rotary),
        qk_norm=bool(config.get("use_qk_norm", False)),
        out_bias=False,
        eps=float(config.get("rms_norm_eps", 1e-5)),
    )


FAMILY = Family(
    name="GLM-4.5",
    architecture="Glm4MoeForCausalLM",
    model_types=("glm4_moe",),
    required=(*SIZES, "num_key_value_heads", *SIGMOID_MOE),
    only={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "moe_layer_freq": (1,),
        "sliding_window": (None,),
    },
    attention=_attention,
    moe=sigmoid_moe,
    moe_layers=after_first_dense,
    norm_eps=1e-5,
)
