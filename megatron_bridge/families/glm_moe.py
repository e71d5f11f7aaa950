"""GLM-4.5 (GLM-4.5, GLM-4.5-Air, GLM-4.6): grouped-query attention that rotates half of a head's channels, query, key
and value biases, sigmoid router with a selection bias, a draft layer.

Sources: GLM-4.5 report (arXiv 2508.06471), `modeling_glm4_moe.py` of transformers, `attention.py`, `moe_utils.py` and
`rotary_pos_embedding.py` of megatron-core 0.16.1. Both rotate the first channels of a head, paired by halves, so rotary
channels need no reordering. The draft layer's names are DeepSeek-V3's.
"""

from __future__ import annotations

from megatron_bridge.families import entries, settings
from megatron_bridge.families.base import Entry, Family, HFConfig, Where
from megatron_bridge.families.keywords import TransformerKeywords

NAME = "glm_moe"

TABLE: tuple[Entry, ...] = (
    entries.embedding(),
    *entries.grouped_attention(entries.LAYER, entries.DECODER),
    *entries.swiglu(entries.LAYER + "mlp", entries.DECODER + "mlp", "dense_ffn", where=Where.DENSE),
    *entries.experts(entries.LAYER, entries.DECODER),
    *entries.output(),
    *entries.draft(
        *entries.grouped_attention(entries.LAYER, entries.DRAFT_LAYER, Where.MTP),
        *entries.experts(entries.LAYER, entries.DRAFT_LAYER, Where.MTP),
    ),
)

_REQUIRED = settings.REQUIRED + settings.REQUIRED_EXPERTS + ("n_routed_experts", "first_k_dense_replace")


def _dims(hf: HFConfig) -> dict[str, int]:
    biased, normed = bool(hf.get("attention_bias")), bool(hf.get("use_qk_norm"))
    return (
        settings.model_dims(hf)
        | settings.grouped_dims(hf, qkv_bias=biased, o_bias=False, qk_norm=normed)
        | settings.expert_dims(hf, hf["n_routed_experts"], router_bias=True)
        | settings.draft_dims(hf)
    )


def _rotary_base(hf: HFConfig) -> float:
    return settings.rope(hf, NAME, partial=True)[1]


def _rotary_percent(hf: HFConfig) -> float:
    """partial_rotary_factor, 0.5 by default as in transformers. Raises ValueError unless it gives an even number of
    channels."""
    rope = settings.rope(hf, NAME, partial=True)[2]
    share = rope.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 0.5
    turned = int(_dims(hf)["head"] * share)
    if turned < 2 or turned % 2 or share > 1:
        raise ValueError(
            f"config.json: partial_rotary_factor = {share} rotates {turned} of a head's {_dims(hf)['head']} "
            "channels: expected an even number"
        )
    return float(share)


def _transformer_config(hf: HFConfig) -> TransformerKeywords:
    settings.refuse_unsupported(hf, NAME, _REQUIRED, settings.ONLY | settings.ONLY_SIGMOID)
    _rotary_percent(hf)
    dims = _dims(hf)
    return (
        settings.decoder(hf, dims, settings.layers_after_dense(hf))
        | settings.grouped_attention(hf, dims)
        | settings.experts(dims)
        | settings.sigmoid_router(hf, dims)
    )


FAMILY = Family(
    name=NAME,
    architectures=frozenset({"Glm4MoeForCausalLM"}),
    model_types=frozenset({"glm4_moe"}),
    table=TABLE,
    dims=_dims,
    moe_layers=settings.layers_after_dense,
    transformer_config=_transformer_config,
    rotary_base=_rotary_base,
    rotary_percent=_rotary_percent,
)
