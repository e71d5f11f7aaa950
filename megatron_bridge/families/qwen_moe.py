"""Qwen3-MoE (Qwen3-30B-A3B, Qwen3-235B-A22B): grouped-query attention, normed heads, softmax router.

Sources: Qwen3 report (arXiv 2505.09388), `modeling_qwen3_moe.py` of transformers, `attention.py`, `moe_utils.py` and
`gpt_layer_specs.py` of megatron-core 0.16.1. Both rotate halves of a head, so rotary channels need no reordering.
"""

from __future__ import annotations

from megatron_bridge.families import entries, settings
from megatron_bridge.families.base import Entry, Family, HFConfig, Where
from megatron_bridge.families.keywords import TransformerKeywords

NAME = "qwen_moe"

TABLE: tuple[Entry, ...] = (
    entries.embedding(),
    *entries.grouped_attention(entries.LAYER, entries.DECODER),
    *entries.swiglu(entries.LAYER + "mlp", entries.DECODER + "mlp", "dense_ffn", where=Where.DENSE),
    *entries.experts(entries.LAYER, entries.DECODER),
    *entries.output(),
)


def _experts(hf: HFConfig) -> int:
    """Number of experts, which transformers 5 saves under either key."""
    return int(hf.get("num_experts") or hf.get("num_local_experts") or 0)


def _dims(hf: HFConfig) -> dict[str, int]:
    biased = bool(hf.get("attention_bias"))
    return (
        settings.model_dims(hf)
        | settings.grouped_dims(hf, qkv_bias=biased, o_bias=biased, qk_norm=True)
        | settings.expert_dims(hf, _experts(hf), router_bias=False)
    )


def _moe_layers(hf: HFConfig) -> tuple[int, ...]:
    dense, step = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step") or 1
    return tuple(i for i in range(hf["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def _refuse_unsupported(hf: HFConfig) -> None:
    required = settings.REQUIRED + settings.REQUIRED_EXPERTS
    settings.refuse_unsupported(hf, NAME, required, settings.ONLY | settings.ONLY_FULL_ATTENTION)
    if not _experts(hf):
        raise ValueError(f"config.json lacks num_experts: family {NAME} needs it")
    if not _moe_layers(hf):
        raise ValueError(
            f"config.json: mlp_only_layers = {hf.get('mlp_only_layers')} with decoder_sparse_step = "
            f"{hf.get('decoder_sparse_step')} leaves no layer with experts among {hf['num_hidden_layers']}"
        )
    if hf["num_experts_per_tok"] < 2 and hf.get("norm_topk_prob", False):
        raise ValueError(
            "config.json: norm_topk_prob with num_experts_per_tok = 1 makes every gate 1: expected at least 2 experts"
        )


def _rotary_base(hf: HFConfig) -> float:
    return settings.rope(hf, NAME)[1]


def _transformer_config(hf: HFConfig) -> TransformerKeywords:
    _refuse_unsupported(hf)
    _rotary_base(hf)
    dims = _dims(hf)
    return (
        settings.decoder(hf, dims, _moe_layers(hf))
        | settings.grouped_attention(hf, dims)
        | settings.experts(dims)
        | {
            "moe_router_score_function": "softmax",
            # A softmax over all experts whose top k is normalized to sum to 1 equals a softmax over the top k logits.
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
        }
    )


FAMILY = Family(
    name=NAME,
    architectures=frozenset({"Qwen3MoeForCausalLM"}),
    model_types=frozenset({"qwen3_moe"}),
    table=TABLE,
    dims=_dims,
    moe_layers=_moe_layers,
    transformer_config=_transformer_config,
    rotary_base=_rotary_base,
)
