"""DeepSeek-V3's architecture (DeepSeek-V3 and R1, Kimi K2, Moonlight): MLA, sigmoid router with a selection bias.

Sources: DeepSeek-V3 report (arXiv 2412.19437), `modeling_deepseek_v3.py` of transformers, `multi_latent_attention.py`
and `moe_utils.py` of megatron-core 0.16.1. Rotary channels need no reordering: megatron-core's MLA de-interleaves
pairs (x0, x1) as the checkpoint's own code does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from megatron_bridge.families.base import Entry, Family, HFConfig, Precision, Split, Where
from megatron_bridge.families.entries import linear, norm, refuse_unsupported, swiglu

_L, _M, _D = "model.layers.{i}.", "decoder.layers.{i}.", "mtp.layers.{j}."


def _attention(hf: str, megatron: str, where: Where) -> tuple[Entry, ...]:
    """MLA between its layer norm and the next."""
    theirs, ours = hf + "self_attn.", megatron + "self_attention."
    down, column = Split.REPLICATED, Split.COLUMN
    return (
        norm(hf + "input_layernorm", megatron + "input_layernorm", "hidden", where=where),
        linear(theirs + "q_proj", ours + "linear_q_proj", ("q_out", "hidden"), column, unless="q_lora", where=where),
        linear(
            theirs + "q_a_proj", ours + "linear_q_down_proj", ("q_lora", "hidden"), down, given="q_lora", where=where
        ),
        norm(theirs + "q_a_layernorm", ours + "q_layernorm", "q_lora", given="q_lora", where=where),
        linear(
            theirs + "q_b_proj", ours + "linear_q_up_proj", ("q_out", "q_lora"), column, given="q_lora", where=where
        ),
        linear(theirs + "kv_a_proj_with_mqa", ours + "linear_kv_down_proj", ("kv_down", "hidden"), down, where=where),
        norm(theirs + "kv_a_layernorm", ours + "kv_layernorm", "kv_lora", where=where),
        linear(theirs + "kv_b_proj", ours + "linear_kv_up_proj", ("kv_out", "kv_lora"), column, where=where),
        linear(theirs + "o_proj", ours + "linear_proj", ("hidden", "o_in"), Split.ROW, where=where),
        norm(hf + "post_attention_layernorm", megatron + "pre_mlp_layernorm", "hidden", where=where),
    )


def _experts(hf: str, megatron: str, where: Where) -> tuple[Entry, ...]:
    """Router, routed experts and shared experts."""
    return (
        Entry(
            hf=(hf + "mlp.gate.weight",),
            megatron=megatron + "mlp.router.weight",
            shapes=(("experts", "hidden"),),
            where=where,
        ),
        Entry(
            hf=(hf + "mlp.gate.e_score_correction_bias",),
            megatron=megatron + "mlp.router.expert_bias",
            shapes=(("experts",),),
            where=where,
            precision=Precision.FP32,
        ),
        *swiglu(hf + "mlp.experts.{e}", megatron + "mlp.experts.local_experts.{e}", "moe_ffn", where=where),
        *swiglu(
            hf + "mlp.shared_experts", megatron + "mlp.shared_experts", "shared_ffn", where=where, given="shared_ffn"
        ),
    )


TABLE: tuple[Entry, ...] = (
    Entry(
        hf=("model.embed_tokens.weight",),
        megatron="embedding.word_embeddings.weight",
        shapes=(("vocab", "hidden"),),
        split=Split.VOCAB,
        where=Where.TOP,
        copies=(_L + "embed_tokens.weight",),
    ),
    *_attention(_L, _M, Where.EVERY),
    *swiglu(_L + "mlp", _M + "mlp", "dense_ffn", where=Where.DENSE),
    *_experts(_L, _M, Where.MOE),
    norm("model.norm", "decoder.final_layernorm", "hidden", where=Where.TOP),
    Entry(
        hf=("lm_head.weight",),
        megatron="output_layer.weight",
        shapes=(("vocab", "hidden"),),
        split=Split.VOCAB,
        where=Where.TOP,
        copies=(_L + "shared_head.head.weight",),
    ),
    norm(_L + "enorm", _D + "enorm", "hidden", where=Where.MTP),
    norm(_L + "hnorm", _D + "hnorm", "hidden", where=Where.MTP),
    # on both sides the input is the normed embedding, then the normed hidden state
    linear(_L + "eh_proj", _D + "eh_proj", ("hidden", "twice_hidden"), Split.COLUMN, where=Where.MTP),
    *_attention(_L, _D + "transformer_layer.", Where.MTP),
    *_experts(_L, _D + "transformer_layer.", Where.MTP),
    norm(_L + "shared_head.norm", _D + "final_layernorm", "hidden", where=Where.MTP),
)


def _dims(hf: HFConfig) -> dict[str, int]:
    heads, nope, rope = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["qk_rope_head_dim"]
    return {
        "layers": hf["num_hidden_layers"],
        "vocab": hf["vocab_size"],
        "mtp": hf.get("num_nextn_predict_layers") or 0,
        "hidden": hf["hidden_size"],
        "twice_hidden": 2 * hf["hidden_size"],
        "dense_ffn": hf["intermediate_size"],
        "moe_ffn": hf["moe_intermediate_size"],
        "shared_ffn": hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0),
        "experts": hf["n_routed_experts"],
        "top_k": hf["num_experts_per_tok"],
        "q_lora": hf.get("q_lora_rank") or 0,
        "kv_lora": hf["kv_lora_rank"],
        "q_out": heads * (nope + rope),
        "kv_down": hf["kv_lora_rank"] + rope,
        "kv_out": heads * (nope + hf["v_head_dim"]),
        "o_in": heads * hf["v_head_dim"],
    }


def _moe_layers(hf: HFConfig) -> tuple[int, ...]:
    return tuple(range(hf["first_k_dense_replace"], hf["num_hidden_layers"]))


def _skipped(hf: HFConfig) -> tuple[str, ...]:
    """The old releases' rotary buffers."""
    return (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "num_experts_per_tok",
    "first_k_dense_replace",
)

# option -> the only values that are trained; the first is what a config that does not say means
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "moe_layer_freq": (1,),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
    "rope_interleave": (True,),
    "attention_dropout": (0.0, 0),
}


def _refuse_unsupported(hf: HFConfig) -> None:
    refuse_unsupported(hf, "deepseek", _REQUIRED, _ONLY)
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ValueError(f"config.json: num_key_value_heads = {kv_heads} differs from num_attention_heads = {heads}")
    if not 0 <= hf["first_k_dense_replace"] < hf["num_hidden_layers"]:
        raise ValueError(
            f"config.json: first_k_dense_replace = {hf['first_k_dense_replace']} leaves no layer with experts among "
            f"{hf['num_hidden_layers']}"
        )
    if hf["num_experts_per_tok"] < 2:
        raise ValueError("config.json: num_experts_per_tok = 1: megatron-core does not normalize a single gate")


def _group_limits(hf: HFConfig) -> tuple[int | None, int | None]:
    """(groups, groups a token), (None, None) where every group is open to every token.

    The checkpoint's code ranks groups by their two best experts, megatron-core by their `top_k // topk_group` best.
    """
    groups, chosen, top_k = hf.get("n_group") or 1, hf.get("topk_group") or 1, hf["num_experts_per_tok"]
    if groups == chosen or groups == 1:
        return None, None
    experts = hf["n_routed_experts"]
    if experts % groups or chosen > groups:
        raise ValueError(f"config.json: n_group = {groups}, topk_group = {chosen} do not fit {experts} experts")
    if top_k // chosen != 2:
        raise ValueError(
            f"config.json: num_experts_per_tok = {top_k} with topk_group = {chosen}: megatron-core ranks groups by "
            f"their {top_k // chosen} best experts, this model by 2"
        )
    return groups, chosen


def _rope(hf: HFConfig) -> dict[str, Any]:
    """Rotary settings from `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta`."""
    rope: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = rope.get("rope_theta") or hf.get("rope_theta") or 10000.0
    if kind == "default":
        # MLA scales its softmax by rotary_scaling_factor even without yarn: 1 means not at all
        return {"rope_type": "rope", "rotary_base": base, "rotary_scaling_factor": 1.0}
    if kind != "yarn":
        raise ValueError(f"config.json: rope type {kind!r} is not trained by family deepseek: want 'default' or 'yarn'")
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
        # the checkpoint's code takes mscale only together with mscale_all_dim
        "mscale": mscale if mscale and all_dim else 1.0,
        "mscale_all_dim": all_dim or 0.0,
    }


def _transformer_config(hf: HFConfig) -> dict[str, Any]:
    _refuse_unsupported(hf)
    dims, moe = _dims(hf), set(_moe_layers(hf))
    groups, chosen = _group_limits(hf)
    return {
        "num_layers": dims["layers"],
        "hidden_size": dims["hidden"],
        "num_attention_heads": hf["num_attention_heads"],
        "ffn_hidden_size": dims["dense_ffn"],
        "normalization": "RMSNorm",
        # transformers norms the two latents with 1e-6 whatever rms_norm_eps says; serving engines take rms_norm_eps
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hf.get("initializer_range", 0.02),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": dims["q_lora"] or None,
        "kv_lora_rank": dims["kv_lora"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
        **_rope(hf),
        # always the list: it also decides that checkpoint keys carry the global layer number
        "moe_layer_freq": [int(i in moe) for i in range(dims["layers"])],
        "num_moe_experts": dims["experts"],
        "moe_ffn_hidden_size": dims["moe_ffn"],
        "moe_shared_expert_intermediate_size": dims["shared_ffn"] or None,
        "moe_router_topk": dims["top_k"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor") or 1.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


FAMILY = Family(
    name="deepseek",
    architectures=frozenset({"DeepseekV3ForCausalLM"}),
    model_types=frozenset({"deepseek_v3", "kimi_k2"}),
    table=TABLE,
    copies=lambda hf: (),
    skipped=_skipped,
    dims=_dims,
    moe_layers=_moe_layers,
    transformer_config=_transformer_config,
    rotary_base=lambda hf: float(_rope(hf)["rotary_base"]),
)
