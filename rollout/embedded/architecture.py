"""What a Hugging Face `config.json` of the DeepSeek-V3 family says, checked and typed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# option -> values this engine computes; an absent option has the first
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "attention_bias": (False,),
    "rope_interleave": (True,),
    "moe_layer_freq": (1,),
    "sliding_window": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Long-context rotary scaling (arXiv 2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    mscale: float | None
    mscale_all_dim: float | None
    attention_factor: float | None
    truncate: bool


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    vocab: int
    hidden: int
    layers: int
    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    v_dim: int
    dense_ffn: int
    expert_ffn: int
    experts: int
    top_k: int
    groups: int
    group_topk: int
    shared_experts: int
    first_dense: int
    routed_scale: float
    renormalize: bool
    norm_eps: float
    latent_norm_eps: float
    tied: bool
    max_position: int
    rope_theta: float
    yarn: Yarn | None
    eos_ids: tuple[int, ...]

    @property
    def latent(self) -> int:
        """Values a token leaves in the cache: normed latent and rotated shared key."""
        return self.kv_lora + self.rope

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_dense

    @property
    def softmax_scale(self) -> float:
        """As transformers: 1/sqrt(head) times the squared yarn magnitude of `mscale_all_dim`."""
        scale = float((self.nope + self.rope) ** -0.5)
        if self.yarn and self.yarn.mscale_all_dim:
            scale *= _magnitude(self.yarn.factor, self.yarn.mscale_all_dim) ** 2
        return scale

    @property
    def rope_mscale(self) -> float:
        """Factor on cos and sin."""
        y = self.yarn
        if y is None:
            return 1.0
        if y.attention_factor is not None:
            return y.attention_factor
        if y.mscale and y.mscale_all_dim:
            return _magnitude(y.factor, y.mscale) / _magnitude(y.factor, y.mscale_all_dim)
        return _magnitude(y.factor)

    def inv_freq(self) -> Tensor:
        """fp32 [rope/2] angles a position, in the order of operations of transformers' rope utilities."""
        pos_freqs = self.rope_theta ** (torch.arange(0, self.rope, 2, dtype=torch.float32) / self.rope)
        y = self.yarn
        if y is None:
            return 1.0 / pos_freqs

        def dim_of(rotations: float) -> float:
            turns = y.original_max_position / (rotations * 2 * math.pi)
            return self.rope * math.log(turns) / (2 * math.log(self.rope_theta))

        low, high = dim_of(y.beta_fast), dim_of(y.beta_slow)
        if y.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rope - 1)
        if low == high:
            high += 0.001  # keeps the ramp finite
        ramp = ((torch.arange(self.rope // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        return (1.0 / (y.factor * pos_freqs)) * (1 - keep) + (1.0 / pos_freqs) * keep

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, eos_ids: tuple[int, ...] | None = None) -> Architecture:
        """Raises ValueError naming the architecture, option or size that this engine does not compute."""
        kinds = list(config.get("architectures") or [])
        kind = kinds[0] if kinds else None
        if config.get("model_type") != "deepseek_v3" or kind not in (None, "DeepseekV3ForCausalLM"):
            raise ValueError(
                f"the embedded engine computes DeepseekV3ForCausalLM (model_type deepseek_v3), "
                f"not {kind} (model_type {config.get('model_type')}); serve that model with rollout.engine = sglang"
            )
        for option, values in _SUPPORTED.items():
            got = config.get(option, values[0])
            if got not in values:
                raise ValueError(f"config.json has {option} = {got!r}; the embedded engine computes {values[0]!r} only")
        theta, yarn = _rope(config)
        try:
            arch = cls(**_sizes(config), rope_theta=theta, yarn=yarn, eos_ids=eos_ids or _ids(config))
        except KeyError as e:
            raise ValueError(
                f"config.json has no {e.args[0]}: it is not a complete DeepSeek-V3 configuration"
            ) from None
        arch._check(config)
        return arch

    def _check(self, config: Mapping[str, Any]) -> None:
        kv_heads = config.get("num_key_value_heads") or self.heads
        if kv_heads != self.heads:
            raise ValueError(
                f"num_key_value_heads = {kv_heads}; latent attention has one for each of {self.heads} heads"
            )
        if self.experts % self.groups or self.group_topk > self.groups:
            raise ValueError(
                f"{self.experts} experts in n_group = {self.groups}, topk_group = {self.group_topk}: "
                "groups must divide the experts and topk_group must not exceed n_group"
            )
        open_experts = self.experts // self.groups * self.group_topk
        if self.top_k > open_experts:
            raise ValueError(
                f"num_experts_per_tok = {self.top_k} exceeds the {open_experts} experts of the open groups"
            )
        if self.groups > 1 and self.experts // self.groups < 2:
            raise ValueError(f"{self.experts} experts in {self.groups} groups: a group is scored by two experts")


def _sizes(c: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab": c["vocab_size"],
        "hidden": c["hidden_size"],
        "layers": c["num_hidden_layers"],
        "heads": c["num_attention_heads"],
        "q_lora": c.get("q_lora_rank"),
        "kv_lora": c["kv_lora_rank"],
        "nope": c["qk_nope_head_dim"],
        "rope": c["qk_rope_head_dim"],
        "v_dim": c["v_head_dim"],
        "dense_ffn": c["intermediate_size"],
        "expert_ffn": c["moe_intermediate_size"],
        "experts": c["n_routed_experts"] if "n_routed_experts" in c else c["num_local_experts"],
        "top_k": c["num_experts_per_tok"],
        "groups": c.get("n_group") or 1,
        "group_topk": c.get("topk_group") or 1,
        "shared_experts": c.get("n_shared_experts") or 0,
        "first_dense": c.get("first_k_dense_replace") or 0,
        "routed_scale": float(c.get("routed_scaling_factor", 1.0)),
        "renormalize": bool(c.get("norm_topk_prob", True)),
        "norm_eps": float(c.get("rms_norm_eps", 1e-6)),
        "latent_norm_eps": 1e-6,  # transformers and DeepSeek build the two latent norms without the config's value
        "tied": bool(c.get("tie_word_embeddings", False)),
        "max_position": int(c.get("max_position_embeddings", 4096)),
    }


def _ids(c: Mapping[str, Any]) -> tuple[int, ...]:
    eos = c.get("eos_token_id")
    return () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)


def _rope(c: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """Both forms: `rope_scaling` beside `rope_theta`, and `rope_parameters` which holds both (transformers 5)."""
    p = dict(c.get("rope_scaling") or c.get("rope_parameters") or {})
    theta = float(p.get("rope_theta") or c.get("rope_theta") or 10000.0)
    kind = p.get("rope_type", p.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn":
        raise ValueError(f"config.json has rope type {kind!r}; the embedded engine computes 'default' and 'yarn'")
    original = p.get("original_max_position_embeddings") or c.get("max_position_embeddings", 4096)
    factor = p.get("factor")
    return theta, Yarn(
        factor=float(factor if factor is not None else c["max_position_embeddings"] / original),
        original_max_position=int(original),
        beta_fast=float(p.get("beta_fast") or 32),
        beta_slow=float(p.get("beta_slow") or 1),
        mscale=p.get("mscale"),
        mscale_all_dim=p.get("mscale_all_dim"),
        attention_factor=p.get("attention_factor"),
        truncate=bool(p.get("truncate", True)),
    )
