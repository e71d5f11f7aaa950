"""Description of a family of models: the config.json it accepts, the options it supports, and readers of the sizes.

An absent key that is not `required` has the default of transformers' configuration class of the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.embedded.families.architecture import (
    Architecture,
    GroupedAttention,
    LatentAttention,
    Moe,
    Rope,
    RouterSpec,
    Yarn,
)

HFConfig = Mapping[str, Any]  # a parsed config.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family.

    required: keys that a config.json must have. only: option -> supported values, of which the first is the default.
    attention, moe, moe_layers: readers of a checked config.json. norm_eps: default of `rms_norm_eps`.
    """

    name: str  # for messages
    architecture: str  # in `architectures`
    model_types: tuple[str, ...]  # values of `model_type`, for a config.json without `architectures`
    required: tuple[str, ...]
    only: Mapping[str, tuple[object, ...]]
    attention: Callable[[HFConfig], LatentAttention | GroupedAttention]
    moe: Callable[[HFConfig], Moe | None]
    moe_layers: Callable[[HFConfig], tuple[int, ...]]
    norm_eps: float = 1e-6

    def read(self, config: HFConfig, eos_ids: tuple[int, ...] | None) -> Architecture:
        """Raises ValueError naming the option or size that is not supported, or the count that is not an integer."""
        missing = [key for key in self.required if config.get(key) is None]
        if missing:
            raise ValueError(f"config.json has no {missing[0]}: it is not a complete {self.name} configuration")
        for key in COUNTS:
            count = config.get(key)
            if count is not None and (type(count) is not int or count < 0):
                raise ValueError(f"config.json has {key} = {count!r}: expected an integer")
        for option, values in (ALWAYS | dict(self.only)).items():
            got = config.get(option, values[0])
            if got not in values:
                raise ValueError(f"config.json has {option} = {got!r}; the embedded engine supports {values[0]!r} only")
        other = sorted(set(config.get("layer_types") or ()) - {"full_attention"})
        if other:
            raise ValueError(
                f"config.json has layer_types {other[0]!r}; the embedded engine supports 'full_attention' only"
            )
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
            eos_ids=tuple(dict.fromkeys(_ids(config) + (eos_ids or ()))),
        )


ALWAYS: dict[str, tuple[object, ...]] = {"hidden_act": ("silu",)}
SIGMOID_MOE = (
    *("moe_intermediate_size", "num_experts_per_tok", "n_shared_experts"),
    *("n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace"),
)
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
COUNTS = (  # must be whole numbers where present
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
    """Grouped-query attention. rotary: the fraction of a head that is rotated. Raises ValueError for odd sizes."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = int(head * rotary)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads = {heads} is not a multiple of num_key_value_heads = {kv_heads}")
    if dim < 2 or dim % 2 or dim > head:
        raise ValueError(
            f"partial_rotary_factor = {rotary} of head_dim = {head} rotates {dim} channels: expected an even number"
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
    """Channels of a head: `head_dim`, which differs from hidden size / heads in the published models."""
    return int(config.get("head_dim") or default or config["hidden_size"] // config["num_attention_heads"])


def sigmoid_moe(config: HFConfig) -> Moe:
    """DeepSeek-V3's router and shared expert (arXiv 2412.19437, section 2.1.2). Raises ValueError without experts."""
    experts = config.get("n_routed_experts") or config.get("num_local_experts")
    if not experts:
        raise ValueError("config.json has no n_routed_experts: it is not a complete configuration")
    width = config["moe_intermediate_size"]
    router = RouterSpec(
        top_k=config["num_experts_per_tok"],
        score="sigmoid",
        groups=config["n_group"],
        group_topk=config["topk_group"],
        scale=float(config["routed_scaling_factor"]),
        renormalize=bool(config.get("norm_topk_prob", True)),
    )
    return Moe(
        experts=experts, router=router, ffn=width, shared_ffn=width * config["n_shared_experts"], selection_bias=True
    )


def after_first_dense(config: HFConfig) -> tuple[int, ...]:
    """All layers from `first_k_dense_replace` on have experts."""
    return tuple(range(config["first_k_dense_replace"], config["num_hidden_layers"]))


def rope(config: HFConfig, *, dim: int, pairs: bool = False) -> Rope:
    """Reads both forms: `rope_scaling` with `rope_theta`, and `rope_parameters`, which holds both (transformers 5)."""
    p = rope_keys(config)
    theta = float(p.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = p.get("rope_type", p.get("type", "default"))
    if kind == "default":
        return Rope(dim=dim, theta=theta, pairs=pairs)
    if kind != "yarn":
        raise ValueError(f"config.json has rope type {kind!r}; the embedded engine supports 'default' and 'yarn'")
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
    r, experts = moe.router, moe.experts
    if experts % r.groups or r.group_topk > r.groups:
        raise ValueError(
            f"config.json has {experts} experts, n_group = {r.groups} and topk_group = {r.group_topk}: n_group "
            "must divide the number of experts, and topk_group must not exceed n_group"
        )
    open_experts = experts // r.groups * r.group_topk
    if r.top_k > open_experts:
        raise ValueError(
            f"config.json has num_experts_per_tok = {r.top_k}, more than the {open_experts} experts of the "
            "selected groups"
        )
    if r.groups > 1 and experts // r.groups < 2:
        raise ValueError(
            f"config.json has {experts} experts in {r.groups} groups: each group needs at least 2 experts, whose "
            "scores are its score"
        )
    return moe
