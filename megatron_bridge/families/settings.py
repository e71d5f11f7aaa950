"""config.json -> dimensions and TransformerConfig keywords, for model parts that several families share.

Megatron's keywords are those of `transformer_config.py` in megatron-core 0.16.1. A setting of config.json that megatron
cannot express raises ValueError naming its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

import torch.nn.functional as F

from megatron_bridge.families.base import HFConfig, is_scalar
from megatron_bridge.families.keywords import TransformerKeywords

REQUIRED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
REQUIRED_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")

# keys of config.json that give the sizes in a table; each must be a whole number where it is present
COUNTS = (
    *REQUIRED,
    *REQUIRED_EXPERTS,
    *("num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "n_group", "topk_group"),
    *("first_k_dense_replace", "decoder_sparse_step", "num_nextn_predict_layers"),
)

NUMBERS = ("rms_norm_eps", "routed_scaling_factor", "rope_theta", "partial_rotary_factor")

# option -> the only supported values; the first is the default of a config without the option
ONLY: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_dropout": (0.0, 0)}
ONLY_SIGMOID: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "moe_layer_freq": (1,),
}
ONLY_FULL_ATTENTION: dict[str, tuple[Any, ...]] = {"use_sliding_window": (False,)}


def refuse_unsupported(hf: HFConfig, family: str, required: Iterable[str], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise ValueError for a config.json that the family cannot train: a `required` key is missing, a key of COUNTS is
    not a whole number, a key of NUMBERS is not a number, an option has a value outside `only`, or a layer does not
    attend to all preceding tokens."""
    if missing := [key for key in required if hf.get(key) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}: family {family} needs them")
    for key in COUNTS:
        count = hf.get(key)
        if count is not None and (type(count) is not int or count < 0):
            raise ValueError(f"config.json: {key} = {count!r}: expected an integer")
    for key in NUMBERS:
        _number(key, hf.get(key))
    labels = hf.get("num_labels") or len(hf.get("id2label") or (0, 1))  # transformers' default is 2
    if is_scalar(hf) and labels != 1:
        raise ValueError(f"config.json: a head with {labels} labels is not supported: expected num_labels = 1")
    for key, allowed in only.items():
        value = hf.get(key, allowed[0])
        if value is not None and value not in allowed:
            raise ValueError(
                f"config.json: {key} = {value!r} is not supported by family {family}: expected {allowed[0]!r}"
            )
    if other := sorted(set(hf.get("layer_types") or ()) - {"full_attention"}):
        raise ValueError(
            f"config.json: layer_types has {other[0]!r}, but family {family} supports only 'full_attention'"
        )


def _number(key: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf):
        raise ValueError(f"config.json: {key} = {value!r}: expected a number")


# dimensions


def model_dims(hf: HFConfig) -> dict[str, int]:
    """Dimensions of every model."""
    tied, scalar = bool(hf.get("tie_word_embeddings", False)), is_scalar(hf)
    return {
        "layers": hf["num_hidden_layers"],
        "vocab": hf["vocab_size"],
        "hidden": hf["hidden_size"],
        "twice_hidden": 2 * hf["hidden_size"],
        "dense_ffn": hf["intermediate_size"],
        "tied": int(tied and not scalar),
        "no_lm_head": int(tied or scalar),
        "score": int(scalar),  # rows of the scalar head
    }


def grouped_dims(
    hf: HFConfig, *, qkv_bias: bool, o_bias: bool, qk_norm: bool, default_head: int | None = None
) -> dict[str, int]:
    """Dimensions of `entries.grouped_attention`. Most published models set head_dim independently of hidden_size /
    num_attention_heads; without the key it is `default_head`, or that quotient."""
    heads = hf["num_attention_heads"]
    head = int(hf.get("head_dim") or default_head or hf["hidden_size"] // heads)
    kv_heads = hf.get("num_key_value_heads") or heads
    return {
        "kv_heads": kv_heads,
        "head": head,
        "q_out": heads * head,
        "kv_out": kv_heads * head,
        "qkv_bias": int(qkv_bias),
        "o_bias": int(o_bias),
        "qk_norm": int(qk_norm),
    }


def expert_dims(hf: HFConfig, experts: int, *, router_bias: bool) -> dict[str, int]:
    """Dimensions of `entries.experts`."""
    return {
        "moe_ffn": hf["moe_intermediate_size"],
        "shared_ffn": hf["moe_intermediate_size"] * (hf.get("n_shared_experts") or 0),
        "experts": experts,
        "top_k": hf["num_experts_per_tok"],
        "router_bias": int(router_bias),
    }


def draft_dims(hf: HFConfig) -> dict[str, int]:
    """Dimensions of `entries.draft`."""
    return {"mtp": hf.get("num_nextn_predict_layers") or 0}


def layers_after_dense(hf: HFConfig) -> tuple[int, ...]:
    """Layers with experts: all but the first `first_k_dense_replace`."""
    return tuple(range(hf["first_k_dense_replace"], hf["num_hidden_layers"]))


# keywords


def decoder(hf: HFConfig, dims: Mapping[str, int], moe_layers: Iterable[int] = ()) -> TransformerKeywords:
    """Keywords of every model: pre-norm layers of RMSNorm and SwiGLU."""
    moe = set(moe_layers)
    return {
        "num_layers": dims["layers"],
        "hidden_size": dims["hidden"],
        "num_attention_heads": hf["num_attention_heads"],
        "ffn_hidden_size": dims["dense_ffn"],
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": hf.get("initializer_range", 0.02),
        # always a list: with a list, checkpoint keys contain the global layer number
        "moe_layer_freq": [int(i in moe) for i in range(dims["layers"])],
    }


def grouped_attention(hf: HFConfig, dims: Mapping[str, int]) -> TransformerKeywords:
    """Keywords of grouped-query attention. Raises ValueError when heads do not divide into groups."""
    heads, kv_heads = hf["num_attention_heads"], dims["kv_heads"]
    if heads % kv_heads:
        raise ValueError(
            f"config.json: num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}"
        )
    return {
        "num_query_groups": kv_heads,
        "kv_channels": dims["head"],
        "qk_layernorm": bool(dims["qk_norm"]),
        "add_qkv_bias": bool(dims["qkv_bias"]),
    }


def experts(dims: Mapping[str, int]) -> TransformerKeywords:
    """Keywords of routed and shared experts."""
    return {
        "num_moe_experts": dims["experts"],
        "moe_ffn_hidden_size": dims["moe_ffn"],
        "moe_shared_expert_intermediate_size": dims["shared_ffn"] or None,
        "moe_router_topk": dims["top_k"],
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
    }


def sigmoid_router(hf: HFConfig, dims: Mapping[str, int]) -> TransformerKeywords:
    """Keywords of DeepSeek-V3's router (arXiv 2412.19437, section 2.1.2): sigmoid scores, a bias that affects only the
    selection, gates normalized to sum to 1 and scaled. Raises ValueError when no layer has experts, for a single
    expert per token, and for expert groups that megatron ranks differently."""
    if not 0 <= hf["first_k_dense_replace"] < dims["layers"]:
        raise ValueError(
            f"config.json: first_k_dense_replace = {hf['first_k_dense_replace']} leaves no layer with experts among "
            f"{dims['layers']}"
        )
    if dims["top_k"] < 2:
        raise ValueError("config.json: num_experts_per_tok = 1: megatron-core does not normalize a single gate")
    groups, chosen = _group_limits(hf, dims)
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": chosen,
        "moe_router_topk_scaling_factor": hf.get("routed_scaling_factor") or 1.0,
    }


def _group_limits(hf: HFConfig, dims: Mapping[str, int]) -> tuple[int | None, int | None]:
    """(groups, groups per token); (None, None) where a token may use every group.

    The checkpoint's code ranks groups by their two best experts, megatron-core by their `top_k // topk_group` best.
    """
    groups, chosen, top_k = hf.get("n_group") or 1, hf.get("topk_group") or 1, dims["top_k"]
    if groups == chosen or groups == 1:
        return None, None
    if dims["experts"] % groups or chosen > groups:
        raise ValueError(
            f"config.json: n_group = {groups} and topk_group = {chosen} do not fit {dims['experts']} experts"
        )
    if top_k // chosen != 2:
        raise ValueError(
            f"config.json: num_experts_per_tok = {top_k} with topk_group = {chosen}: megatron-core ranks groups "
            f"by their {top_k // chosen} best experts, but this model by 2"
        )
    return groups, chosen


def rope(
    hf: HFConfig, family: str, kinds: tuple[str, ...] = ("default",), *, partial: bool = False
) -> tuple[str, float, Mapping[str, Any]]:
    """(kind, base, all settings) from `rope_parameters` (transformers 5) or `rope_scaling` + `rope_theta`. Raises
    ValueError for a kind outside `kinds` and, unless `partial`, for a model that rotates only part of each head."""
    settings: Mapping[str, Any] = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    for key in ("rope_theta", "partial_rotary_factor"):
        _number(key, settings.get(key))
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in kinds:
        wanted = " or ".join(repr(k) for k in kinds)
        raise ValueError(f"config.json: rope type {kind!r} is not supported by family {family}: expected {wanted}")
    share = settings.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    if share != 1.0 and not partial:
        raise ValueError(
            f"config.json: partial_rotary_factor = {share} is not supported by family {family}: expected 1"
        )
    return kind, float(settings.get("rope_theta") or hf.get("rope_theta") or 10000.0), settings
