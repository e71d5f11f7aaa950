"""Qwen3 without experts (Qwen3-0.6B to Qwen3-32B): grouped-query attention and normed heads.

Sources: Qwen3 report (arXiv 2505.09388), `modeling_qwen3.py` of transformers, `attention.py` and `gpt_layer_specs.py`
of megatron-core 0.16.1. Both rotate halves of a head, so rotary channels need no reordering.
"""

from __future__ import annotations

from megatron_bridge.families import entries, settings
from megatron_bridge.families.base import Entry, Family, HFConfig
from megatron_bridge.families.keywords import TransformerKeywords

NAME = "qwen_dense"

TABLE: tuple[Entry, ...] = (
    entries.embedding(),
    *entries.grouped_attention(entries.LAYER, entries.DECODER),
    *entries.swiglu(entries.LAYER + "mlp", entries.DECODER + "mlp", "dense_ffn"),
    *entries.output(),
)


def _dims(hf: HFConfig) -> dict[str, int]:
    biased = bool(hf.get("attention_bias"))
    attention = settings.grouped_dims(hf, qkv_bias=biased, o_bias=biased, qk_norm=True, default_head=128)
    return settings.model_dims(hf) | attention


def _rotary_base(hf: HFConfig) -> float:
    return settings.rope(hf, NAME)[1]


def _transformer_config(hf: HFConfig) -> TransformerKeywords:
    settings.refuse_unsupported(hf, NAME, settings.REQUIRED, settings.ONLY | settings.ONLY_FULL_ATTENTION)
    _rotary_base(hf)
    dims = _dims(hf)
    return settings.decoder(hf, dims) | settings.grouped_attention(hf, dims)


FAMILY = Family(
    name=NAME,
    architectures=frozenset({"Qwen3ForCausalLM"}),
    model_types=frozenset({"qwen3"}),
    table=TABLE,
    dims=_dims,
    transformer_config=_transformer_config,
    rotary_base=_rotary_base,
)
