"""Decoded weights in the shape the model multiplies with: projections of one input fused, experts stacked.

Letters: D hidden, I expert width, E experts, H heads, Hk key/value heads, C latent rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.embedded.architecture import GroupedAttention, LatentAttention, Moe
from rollout.embedded.weights import WeightStore


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentWeights:
    down: Tensor  # [q_lora + C + rope, D]: q_a | kv_a; without q_lora [H * head + C + rope, D]: q | kv_a
    down_bias: Tensor | None  # of the rows of `down`
    q_norm: Tensor | None  # [q_lora]
    q_up: Tensor | None  # [H * head, q_lora]
    kv_norm: Tensor  # [C]
    kv_up: Tensor  # [H * (nope + v), C]
    key_up: Tensor  # [H, nope, C], a view of kv_up
    value_up: Tensor  # [H, C, v], a view of kv_up
    out: Tensor  # [D, H * v]
    out_bias: Tensor | None  # [D]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupedWeights:
    qkv: Tensor  # [(H + 2 Hk) * head, D]: query heads, key heads, value heads
    qkv_bias: Tensor | None  # [(H + 2 Hk) * head]
    q_norm: Tensor | None  # [head]
    k_norm: Tensor | None  # [head]
    out: Tensor  # [D, H * head]
    out_bias: Tensor | None  # [D]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MlpWeights:
    gate_up: Tensor  # [2I, D]
    down: Tensor  # [D, I]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoeWeights:
    router: Tensor  # [E, D] fp32
    bias: Tensor | None  # [E] fp32, for the choice alone
    gate_up: Tensor  # [E, 2I, D]
    down: Tensor  # [E, D, I]
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    input_norm: Tensor  # [D]
    post_norm: Tensor  # [D]
    attention: LatentWeights | GroupedWeights
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelWeights:
    embed: Tensor  # [V, D]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [D]
    head: Tensor  # [V, D]


def prepare(
    store: WeightStore, dtype: torch.dtype, *, old: ModelWeights | None = None, changed: Iterable[str] = ()
) -> ModelWeights:
    """Of the whole store; with `old`, only what the names in `changed` touch is made again."""
    embed = store.decoded("model.embed_tokens.weight", dtype)
    prefixes = {".".join(n.split(".")[:3]) for n in changed}
    layers = tuple(
        _layer(store, i, dtype) if old is None or f"model.layers.{i}" in prefixes else old.layers[i]
        for i in range(store.arch.layers)
    )
    return ModelWeights(
        embed=embed,
        layers=layers,
        norm=store.decoded("model.norm.weight", dtype),
        head=embed if store.arch.tied else store.decoded("lm_head.weight", dtype),
    )


def _layer(store: WeightStore, i: int, dtype: torch.dtype) -> LayerWeights:
    p, arch = f"model.layers.{i}.", store.arch
    a, moe = arch.attention, arch.moe if i in arch.moe_layers else None
    attention = p + "self_attn."
    return LayerWeights(
        input_norm=store.decoded(p + "input_layernorm.weight", dtype),
        post_norm=store.decoded(p + "post_attention_layernorm.weight", dtype),
        attention=_latent(store, a, attention, dtype)
        if isinstance(a, LatentAttention)
        else _grouped(store, a, attention, dtype),
        mlp=_mlp(store, p + "mlp.", dtype) if moe is None else _moe(store, moe, p + "mlp.", dtype),
    )


def _latent(store: WeightStore, a: LatentAttention, p: str, dtype: torch.dtype) -> LatentWeights:
    lora = a.q_lora is not None
    first = store.decoded(p + ("q_a_proj.weight" if lora else "q_proj.weight"), dtype)
    kv_up = store.decoded(p + "kv_b_proj.weight", dtype)
    bias = None
    if a.bias:
        of_q = store.decoded(p + "q_a_proj.bias", dtype) if lora else torch.zeros(len(first), dtype=dtype)
        bias = torch.cat([of_q, store.decoded(p + "kv_a_proj_with_mqa.bias", dtype)])
    by_head = kv_up.view(a.heads, a.nope + a.v_dim, a.kv_lora)
    return LatentWeights(
        down=torch.cat([first, store.decoded(p + "kv_a_proj_with_mqa.weight", dtype)]),
        down_bias=bias,
        q_norm=store.decoded(p + "q_a_layernorm.weight", dtype) if lora else None,
        q_up=store.decoded(p + "q_b_proj.weight", dtype) if lora else None,
        kv_norm=store.decoded(p + "kv_a_layernorm.weight", dtype),
        kv_up=kv_up,
        key_up=by_head[:, : a.nope],
        value_up=by_head[:, a.nope :].transpose(1, 2),
        out=store.decoded(p + "o_proj.weight", dtype),
        out_bias=store.decoded(p + "o_proj.bias", dtype) if a.bias else None,
    )


def _grouped(store: WeightStore, a: GroupedAttention, p: str, dtype: torch.dtype) -> GroupedWeights:
    def fused(leaf: str) -> Tensor:
        return torch.cat([store.decoded(f"{p}{n}_proj.{leaf}", dtype) for n in "qkv"])

    return GroupedWeights(
        qkv=fused("weight"),
        qkv_bias=fused("bias") if a.qkv_bias else None,
        q_norm=store.decoded(p + "q_norm.weight", dtype) if a.qk_norm else None,
        k_norm=store.decoded(p + "k_norm.weight", dtype) if a.qk_norm else None,
        out=store.decoded(p + "o_proj.weight", dtype),
        out_bias=store.decoded(p + "o_proj.bias", dtype) if a.out_bias else None,
    )


def _mlp(store: WeightStore, p: str, dtype: torch.dtype) -> MlpWeights:
    halves = [store.decoded(p + f"{n}_proj.weight", dtype) for n in ("gate", "up")]
    return MlpWeights(gate_up=torch.cat(halves), down=store.decoded(p + "down_proj.weight", dtype))


def _moe(store: WeightStore, m: Moe, p: str, dtype: torch.dtype) -> MoeWeights:
    gate, up, down = (
        store.decoded_stack([f"{p}experts.{e}.{n}_proj.weight" for e in range(m.experts)], dtype)
        for n in ("gate", "up", "down")
    )
    return MoeWeights(
        router=store.decoded(p + "gate.weight", torch.float32),
        bias=store.decoded(p + "gate.e_score_correction_bias", torch.float32) if m.selection_bias else None,
        gate_up=torch.cat([gate, up], 1),
        down=down,
        shared=_mlp(store, p + "shared_experts.", dtype) if m.shared_ffn else None,
    )
