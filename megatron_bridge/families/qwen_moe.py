"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): grouped-query attention, normed heads, softmax router.

Sources: Qwen3 report (arXiv 2505.09388), `modeling_qwen3_moe.py` of transformers, `attention.py`, `moe_utils.py` and
`gpt_layer_specs.py` of megatron-core 0.16.1. Both rotate halves of a head, so rotary channels need no reordering.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from megatron_bridge.families.base import Entry, Family, HFConfig, Split, Where
from megatron_bridge.families.entries import linear, norm, refuse_unsupported, swiglu

_L, _M = "model.layers.{i}.", "decoder.layers.{i}."
_ATTN, _MATTN = _L + "self_attn.", _M + "self_attention."

TABLE: tuple[Entry, ...] = (
    Entry(
        hf=("model.embed_tokens.weight",),
        megatron="embedding.word_embeddings.weight",
        shapes=(("vocab", "hidden"),),
        split=Split.VOCAB,
        where=Where.TOP,
    ),
    # In checkpoints the local spec's two layer norms carry the names that TransformerEngine's fused linears give them,
    # the second one before experts too, where no such linear exists (sharded_state_dict_keys_map).
    norm(_L + "input_layernorm", _M + "input_layernorm", "hidden", stored=_MATTN + "linear_qkv.layer_norm_weight"),
    Entry(
        hf=(_ATTN + "q_proj.weight", _ATTN + "k_proj.weight", _ATTN + "v_proj.weight"),
        megatron=_MATTN + "linear_qkv.weight",
        shapes=(("q_out", "hidden"), ("kv_out", "hidden"), ("kv_out", "hidden")),
        split=Split.QKV,
        linear=True,
    ),
    norm(_ATTN + "q_norm", _MATTN + "q_layernorm", "head"),
    norm(_ATTN + "k_norm", _MATTN + "k_layernorm", "head"),
    linear(_ATTN + "o_proj", _MATTN + "linear_proj", ("hidden", "q_out"), Split.ROW),
    norm(
        _L + "post_attention_layernorm",
        _M + "pre_mlp_layernorm",
        "hidden",
        stored=_M + "mlp.linear_fc1.layer_norm_weight",
    ),
    *swiglu(_L + "mlp", _M + "mlp", "dense_ffn", where=Where.DENSE),
    Entry(
        hf=(_L + "mlp.gate.weight",),
        megatron=_M + "mlp.router.weight",
        shapes=(("experts", "hidden"),),
        where=Where.MOE,
    ),
    *swiglu(_L + "mlp.experts.{e}", _M + "mlp.experts.local_experts.{e}", "moe_ffn", where=Where.MOE),
    norm("model.norm", "decoder.final_layernorm", "hidden", where=Where.TOP),
    Entry(
        hf=("lm_head.weight",),
        megatron="output_layer.weight",
        shapes=(("vocab", "hidden"),),
        split=Split.VOCAB,
        where=Where.TOP,
        unless="tied",
    ),
)


def _head(hf: HFConfig) -> int:
    """Size of a head: its own key, unrelated to hidden size / heads in the published models."""
    return int(hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def _tied(hf: HFConfig) -> bool:
    return bool(hf.get("tie_word_embeddings", False))


def _dims(hf: HFConfig) -> dict[str, int]:
    head, kv_heads = _head(hf), hf.get("num_key_value_heads") or hf["num_attention_heads"]
    return {
        "layers": hf["num_hidden_layers"],
        "vocab": hf["vocab_size"],
        "hidden": hf["hidden_size"],
        "dense_ffn": hf["intermediate_size"],
        "moe_ffn": hf["moe_intermediate_size"],
        "experts": _experts(hf),
        "top_k": hf["num_experts_per_tok"],
        "kv_heads": kv_heads,
        "head": head,
        "q_out": hf["num_attention_heads"] * head,
        "kv_out": kv_heads * head,
        "tied": int(_tied(hf)),
    }


def _experts(hf: HFConfig) -> int:
    """transformers 5 saves the number under either name."""
    return int(hf.get("num_experts") or hf["num_local_experts"])


def _moe_layers(hf: HFConfig) -> tuple[int, ...]:
    dense, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step") or 1
    return tuple(i for i in range(hf["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def _skipped(hf: HFConfig) -> tuple[str, ...]:
    """With tied embeddings some releases store the head nevertheless; it is never read."""
    return (r"lm_head\.weight",) if _tied(hf) else ()


def _copies(hf: HFConfig) -> tuple[str, ...]:
    """With tied embeddings a last pipeline stage holds the embedding under the head's name."""
    return ("output_layer.weight",) if _tied(hf) else ()


_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "num_experts_per_tok",
)

# option -> the only values that are trained; the first is what a config that does not say means
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "use_sliding_window": (False,),
    "attention_dropout": (0.0, 0),
}


def _refuse_unsupported(hf: HFConfig) -> None:
    refuse_unsupported(hf, "qwen_moe", _REQUIRED, _ONLY)
    if not (hf.get("num_experts") or hf.get("num_local_experts")):
        raise ValueError("config.json lacks num_experts: family qwen_moe needs it")
    heads, kv_heads = hf["num_attention_heads"], _dims(hf)["kv_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}"
        )
    if not _moe_layers(hf):
        raise ValueError(
            f"config.json: mlp_only_layers = {hf.get('mlp_only_layers')} with decoder_sparse_step = "
            f"{hf.get('decoder_sparse_step')} leaves no layer with experts among {hf['num_hidden_layers']}"
        )
    if hf["num_experts_per_tok"] < 2 and hf.get("norm_topk_prob", False):
        raise ValueError("config.json: norm_topk_prob with num_experts_per_tok = 1 makes every gate 1: want 2 experts")


def _rotary_base(hf: HFConfig) -> float:
    """From `rope_parameters` (transformers 5) or `rope_theta`. Raises ValueError for scaled rotary embeddings."""
    rope: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"config.json: rope type {kind!r} is not trained by family qwen_moe: want 'default'")
    return float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0)


def _transformer_config(hf: HFConfig) -> dict[str, Any]:
    _refuse_unsupported(hf)
    _rotary_base(hf)
    dims, moe = _dims(hf), set(_moe_layers(hf))
    return {
        "num_layers": dims["layers"],
        "hidden_size": dims["hidden"],
        "num_attention_heads": hf["num_attention_heads"],
        "num_query_groups": dims["kv_heads"],
        "kv_channels": dims["head"],
        "ffn_hidden_size": dims["dense_ffn"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hf.get("initializer_range", 0.02),
        "qk_layernorm": True,
        # always the list: it also decides that checkpoint keys carry the global layer number
        "moe_layer_freq": [int(i in moe) for i in range(dims["layers"])],
        "num_moe_experts": dims["experts"],
        "moe_ffn_hidden_size": dims["moe_ffn"],
        "moe_router_topk": dims["top_k"],
        "moe_router_score_function": "softmax",
        # A softmax over all experts, its top k made to sum to 1, is a softmax over the top k logits.
        "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


FAMILY = Family(
    name="qwen_moe",
    architectures=frozenset({"Qwen3MoeForCausalLM"}),
    model_types=frozenset({"qwen3_moe"}),
    table=TABLE,
    copies=_copies,
    skipped=_skipped,
    dims=_dims,
    moe_layers=_moe_layers,
    transformer_config=_transformer_config,
    rotary_base=_rotary_base,
)
