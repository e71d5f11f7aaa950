"""DeepSeek-V3's architecture (DeepSeek-V3, R1 and V3.1, Kimi K2, Moonlight): MLA, sigmoid router with a selection bias.

Sources: DeepSeek-V3 report (arXiv 2412.19437), `modeling_deepseek_v3.py` of transformers, `multi_latent_attention.py`
and `moe_utils.py` of megatron-core 0.16.1. Rotary channels need no reordering: megatron-core's MLA de-interleaves
pairs (x0, x1) as the checkpoint's own code does.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron_bridge.families import entries, settings
from megatron_bridge.families.base import Entry, Family, HFConfig, Split, Where
from megatron_bridge.families.entries import bias, linear, norm
from megatron_bridge.families.keywords import TransformerKeywords

NAME = "deepseek"
# SGLang 0.5.23 concatenates q_a_proj, if present, with kv_a_proj_with_mqa to fused_qkv_a_proj_with_mqa, tensor by
# tensor (weight, scale, bias), through a dictionary local to one load_weights call: if the two come in different calls
# neither is loaded, and no error is raised (cached_a_proj in do_load_weights,
# sglang/srt/models/deepseek_common/deepseek_weight_loader.py). Its other stacked parameters (gate_up_proj, w13_weight)
# are loaded shard by shard in any number of calls, and w_kc and w_vc are rebuilt in each call that has kv_b_proj.
_QKV_A = "qkv_a"


def _attention(hf: str, megatron: str, where: Where) -> tuple[Entry, ...]:
    """MLA with the layer norms before and after it."""
    theirs, ours = hf + "self_attn.", megatron + "self_attention."
    down, column = Split.REPLICATED, Split.COLUMN
    q_down, kv_down = (theirs + "q_a_proj", ours + "linear_q_down_proj"), ours + "linear_kv_down_proj"
    return (
        norm(hf + "input_layernorm", megatron + "input_layernorm", "hidden", where=where),
        linear(theirs + "q_proj", ours + "linear_q_proj", ("q_out", "hidden"), column, unless="q_lora", where=where),
        linear(*q_down, ("q_lora", "hidden"), down, given="q_lora", where=where, fused=_QKV_A),
        bias(*q_down, "q_lora", given="q_a_bias", where=where, fused=_QKV_A),
        norm(theirs + "q_a_layernorm", ours + "q_layernorm", "q_lora", given="q_lora", where=where),
        linear(
            theirs + "q_b_proj", ours + "linear_q_up_proj", ("q_out", "q_lora"), column, given="q_lora", where=where
        ),
        linear(theirs + "kv_a_proj_with_mqa", kv_down, ("kv_down", "hidden"), down, where=where, fused=_QKV_A),
        bias(theirs + "kv_a_proj_with_mqa", kv_down, "kv_down", given="bias", where=where, fused=_QKV_A),
        norm(theirs + "kv_a_layernorm", ours + "kv_layernorm", "kv_lora", where=where),
        linear(theirs + "kv_b_proj", ours + "linear_kv_up_proj", ("kv_out", "kv_lora"), column, where=where),
        linear(theirs + "o_proj", ours + "linear_proj", ("hidden", "o_in"), Split.ROW, where=where),
        bias(theirs + "o_proj", ours + "linear_proj", "hidden", given="bias", where=where),
        norm(hf + "post_attention_layernorm", megatron + "pre_mlp_layernorm", "hidden", where=where),
    )


TABLE: tuple[Entry, ...] = (
    entries.embedding(),
    *_attention(entries.LAYER, entries.DECODER, Where.EVERY),
    *entries.swiglu(entries.LAYER + "mlp", entries.DECODER + "mlp", "dense_ffn", where=Where.DENSE),
    *entries.experts(entries.LAYER, entries.DECODER),
    *entries.output(),
    *entries.draft(
        *_attention(entries.LAYER, entries.DRAFT_LAYER, Where.MTP),
        *entries.experts(entries.LAYER, entries.DRAFT_LAYER, Where.MTP),
    ),
)

_REQUIRED = (
    *settings.REQUIRED,
    *settings.REQUIRED_EXPERTS,
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "first_k_dense_replace",
)


def _dims(hf: HFConfig) -> dict[str, int]:
    heads, nope, rope = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    q_lora, biased = hf.get("q_lora_rank") or 0, bool(hf.get("attention_bias"))
    return (
        settings.model_dims(hf)
        | settings.expert_dims(hf, hf["n_routed_experts"], router_bias=True)
        | settings.draft_dims(hf)
        | {
            "q_lora": q_lora,
            "kv_lora": hf["kv_lora_rank"],
            "q_out": heads * (nope + rope),
            "kv_down": hf["kv_lora_rank"] + rope,
            "kv_out": heads * (nope + hf["v_head_dim"]),
            "o_in": heads * hf["v_head_dim"],
            "bias": int(biased),
            "q_a_bias": int(biased and q_lora > 0),
        }
    )


def _refuse_unsupported(hf: HFConfig) -> None:
    only = settings.ONLY | settings.ONLY_SIGMOID | {"rope_interleave": (True,)}
    settings.refuse_unsupported(hf, NAME, _REQUIRED, only)
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ValueError(f"config.json: num_key_value_heads = {kv_heads} differs from num_attention_heads = {heads}")


def _rope(hf: HFConfig) -> TransformerKeywords:
    """MLA's rotary keywords."""
    kind, base, rope = settings.rope(hf, NAME, ("default", "yarn"))
    if kind == "default":
        # MLA scales its softmax by rotary_scaling_factor even without yarn; 1 has no effect
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    if rope.get("attention_factor") is not None or rope.get("truncate", True) is not True:
        raise ValueError("config.json: yarn's attention_factor and truncate cannot be set in megatron-core")
    for key in ("factor", "original_max_position_embeddings"):
        if rope.get(key) is None:
            raise ValueError(f"config.json: yarn needs {key} in rope_scaling")
    mscale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    if all_dim and not mscale:
        raise ValueError("config.json: yarn's mscale_all_dim without mscale cannot be expressed in megatron-core")
    return {
        "rope_type": "yarn",
        "rotary_base": base,
        "rotary_scaling_factor": rope["factor"],
        "original_max_position_embeddings": rope["original_max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32,
        "beta_slow": rope.get("beta_slow") or 1,
        # the checkpoint's code uses mscale only together with mscale_all_dim
        "mscale": mscale if mscale and all_dim else 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }


def _attention_config(hf: HFConfig, dims: Mapping[str, int]) -> TransformerKeywords:
    return {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": dims["q_lora"] or None,
        "kv_lora_rank": dims["kv_lora"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
    }


def _transformer_config(hf: HFConfig) -> TransformerKeywords:
    _refuse_unsupported(hf)
    dims = _dims(hf)
    return (
        # transformers always normalizes the two latents with 1e-6; serving engines use rms_norm_eps
        settings.decoder(hf, dims, settings.layers_after_dense(hf))
        | _attention_config(hf, dims)
        | _rope(hf)
        | settings.experts(dims)
        | settings.sigmoid_router(hf, dims)
    )


FAMILY = Family(
    name=NAME,
    architectures=frozenset({"DeepseekV3ForCausalLM"}),
    model_types=frozenset({"deepseek_v3", "kimi_k2"}),
    table=TABLE,
    dims=_dims,
    moe_layers=settings.layers_after_dense,
    skipped=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # rotary buffers of old releases
    transformer_config=_transformer_config,
    rotary_base=lambda hf: float(_rope(hf)["rotary_base"]),
)
