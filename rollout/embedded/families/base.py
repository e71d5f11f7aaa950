"""A family of models is data: whose config.json it reads, which options it computes, and where the sizes are.

An absent key that is not `required` means what it means to transformers' configuration class of the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.embedded.architecture import Architecture, GroupedAttention, LatentAttention, Moe, Rope, Yarn

HFConfig = Mapping[str, Any]  # a parsed config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`only`: option -> the values that are computed; a config.json that does not say means the first.

    required: keys without which a config.json is not whole. attention, moe, moe_layers, moe_ffn: readers of a checked
    config.json. norm_eps: default of `rms_norm_eps`.
    """

    name: str  # for messages
    architecture: str  # in `architectures`
    model_types: tuple[str, ...]  # which it goes by where there are none
    required: tuple[str, ...]
    only: Mapping[str, tuple[object, ...]]
    attention: Callable[[HFConfig], LatentAttention | GroupedAttention]
    moe: Callable[[HFConfig], Moe | None]
    moe_layers: Callable[[HFConfig], tuple[int, ...]]
    norm_eps: float = 1e-6

    def read(self, config: HFConfig, eos_ids: tuple[int, ...] | None) -> Architecture:
        """Raises ValueError naming the option or size that is not computed, or the count that is no whole number."""
        missing = [key for key in self.required if config.get(key) is None]
        if missing:
            raise ValueError(f"config.json has no {missing[0]}: it is not a complete {self.name} configuration")
        for key in COUNTS:
            count = config.get(key)
            if count is not None and (type(count) is not int or count < 0):
                raise ValueError(f"config.json has {key} = {count!r}: want a whole number")
        for option, values in (ALWAYS | dict(self.only)).items():
            got = config.get(option, values[0])
            if got not in values:
                raise ValueError(f"config.json has {option} = {got!r}; the embedded engine computes {values[0]!r} only")
        other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
        if other:
            raise ValueError(f"config.json has layer_types {other[0]!r}; the embedded engine computes 'full_attention'")
        return Architecture(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            attention=self.attention(config),
            dense_ffn=config["intermediate_size"],
            moe=_checked(self.moe(config)),
            moe_layers=self.moe_layers(config),
            norm_eps=float(config.get("rms_norm_eps", self.norm_eps)),
            tied=bool(config.get("tie_word_embeddings", False)),
            mtp_layers=int(config.get("num_nextn_predict_layers") or 0),
            max_position=int(config.get("max_position_embeddings", 4096)),
            eos_ids=tuple(dict.fromkeys(_ids(config) + (eos_ids or ()))),
        )


ALWAYS: dict[str, tuple[object, ...]] = {"hidden_act": ("silu",)}
SIGMOID_MOE = (
    *("moe_intermediate_size", "num_experts_per_tok", "n_shared_experts"),
    *("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace"),
)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
COUNTS = (  # whole numbers where they are given at all
    *SIZES,
    *("num_key_value_heads", "head_dim"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("moe_intermediate_size", "num_experts_per_tok", "num_experts", "num_local_experts", "n_routed_experts"),
    *("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "decoder_sparse_step"),
    *("num_nextn_predict_layers", "max_position_embeddings"),
)


def grouped(
    config: HFConfig, *, head: int, rotary: float, qk_norm: bool, out_bias: bool, eps: float
) -> GroupedAttention:
    """Grouped-query attention; `rotary`: the part of a head that is rotated. Raises ValueError for odd sizes."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = int(head * rotary)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads = {heads} is no multiple of num_key_value_heads = {kv_heads}")
    if dim < 2 or dim % 2 or dim > head:
        raise ValueError(
            f"partial_rotary_factor = {rotary} of head_dim = {head} rotates {dim} channels: want an even number"
        )
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head=head,
        rope=rope(config, dim=dim),
        qk_norm=qk_norm,
        qkv_bias=bool(config.get("attention_bias", False)),
        out_bias=out_bias,
        norm_eps=eps,
    )


def head_dim(config: HFConfig, default: int | None = None) -> int:
    """Channels of a head: its own key, unrelated to hidden size / heads in the published models."""
    return int(config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"])


def sigmoid_moe(config: HFConfig) -> Moe:
    """DeepSeek-V3's router and shared expert (arXiv 2412.19437, section 2.1.2). Raises ValueError without experts."""
    experts = config.get("n_routed_experts") or config.get("num_local_experts")
    if not experts:
        raise ValueError("config.json has no n_routed_experts: it is not a complete configuration")
    width = config["moe_intermediate_size"]
    return Moe(
        experts=experts,
        top_k=config["num_experts_per_tok"],
        ffn=width,
        shared_ffn=width * config["n_shared_experts"],
        score="sigmoid",
        selection_bias=True,
        groups=config["n_group"],
        group_topk=config["topk_group"],
        scale=float(config["routed_scaling_factor"]),
        renormalize=bool(config.get("norm_topk_prob", True)),
    )


def after_first_dense(config: HFConfig) -> tuple[int, ...]:
    """All layers from `first_k_dense_replace` on have experts."""
    return tuple(range(config["first_k_dense_replace"], config["num_hidden_layers"]))


def rope(config: HFConfig, *, dim: int, pairs: bool = False) -> Rope:
    """Both forms: `rope_scaling` beside `rope_theta`, and `rope_parameters` which holds both (transformers 5)."""
    p = rope_keys(config)
    theta = float(p.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = p.get("rope_type", p.get("type", "default"))
    if kind == "default":
        return Rope(dim=dim, theta=theta, pairs=pairs)
    if kind != "yarn":
        raise ValueError(f"config.json has rope type {kind!r}; the embedded engine computes 'default' and 'yarn'")
    original = p.get("original_max_position_embeddings") or config.get("max_position_embeddings", 4096)
    factor = p.get("factor")
    yarn = Yarn(
        factor=float(factor if factor is not None else config["max_position_embeddings"] / original),
        original_max_position=int(original),
        beta_fast=float(p.get("beta_fast") or 32),
        beta_slow=float(p.get("beta_slow") or 1),
        mscale=p.get("mscale"),
        mscale_all_dim=p.get("mscale_all_dim"),
        attention_factor=p.get("attention_factor"),
        truncate=bool(p.get("truncate", True)),
    )
    return Rope(dim=dim, theta=theta, yarn=yarn, pairs=pairs)


def rope_keys(config: HFConfig) -> dict[str, Any]:
    return dict(config.get("rope_scaling") or config.get("rope_parameters") or {})


def _ids(config: HFConfig) -> tuple[int, ...]:
    eos = config.get("eos_token_id")
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)


def _checked(moe: Moe | None) -> Moe | None:
    if moe is None:
        return None
    if moe.experts % moe.groups or moe.group_topk > moe.groups:
        raise ValueError(
            f"{moe.experts} experts in n_group = {moe.groups}, topk_group = {moe.group_topk}: "
            "groups must divide the experts and topk_group must not exceed n_group"
        )
    open_experts = moe.experts // moe.groups * moe.group_topk
    if moe.top_k > open_experts:
        raise ValueError(f"num_experts_per_tok = {moe.top_k} exceeds the {open_experts} experts of the open groups")
    if moe.groups > 1 and moe.experts // moe.groups < 2:
        raise ValueError(f"{moe.experts} experts in {moe.groups} groups: a group is scored by two experts")
    return moe
