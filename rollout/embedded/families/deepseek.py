"""DeepSeek-V3's architecture (DeepSeek-V3, R1, V3.1, Kimi-K2): latent attention, sigmoid router with groups.

Source: DeepSeek-V3 report (arXiv 2412.19437), `modeling_deepseek_v3.py` of transformers.
"""

from __future__ import annotations

from rollout.embedded.families.architecture import LatentAttention
from rollout.embedded.families.base import SIGMOID_MOE, SIZES, Family, HFConfig, after_first_dense, rope, sigmoid_moe


def _attention(config: HFConfig) -> LatentAttention:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if kv_heads != heads:
        raise ValueError(
            f"config.json has num_key_value_heads = {kv_heads}, but latent attention needs one for each of "
            f"{heads} heads"
        )
    return LatentAttention(
        heads=heads,
        q_lora=config.get("q_lora_rank"),
        kv_lora=config["kv_lora_rank"],
        nope=config["qk_nope_head_dim"],
        v_dim=config["v_head_dim"],
        rope=rope(config, dim=config["qk_rope_head_dim"], pairs=True),
        bias=bool(config.get("attention_bias", False)),
        # as in SGLang and the trainer; transformers always uses 1e-6 here
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
    )


FAMILY = Family(
    name="DeepSeek-V3",
    architecture="DeepseekV3ForCausalLM",
    model_types=("deepseek_v3", "kimi_k2"),
    required=(
        *SIZES,
        *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        *SIGMOID_MOE,
    ),
    only={
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
        "rope_interleave": (True,),
        "moe_layer_freq": (1,),
        "sliding_window": (None,),
    },
    attention=_attention,
    moe=sigmoid_moe,
    moe_layers=after_first_dense,
)
