"""The architecture of a model: attention, rotary positions, the MLP of each layer, the head.

Each family reads an architecture from a `config.json`; the rest of the engine does not depend on the family. Attention
is latent or grouped-query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


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
class Rope:
    """Rotary positions (arXiv 2104.09864) for `dim` channels of a head."""

    dim: int
    theta: float
    yarn: Yarn | None = None
    pairs: bool = False  # rotate channels (0, 1), (2, 3), ... instead of (0, dim/2), (1, dim/2 + 1), ...

    @property
    def mscale(self) -> float:
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
        """fp32 [dim/2] angles per position, with the order of operations of transformers' rope utilities."""
        pos_freqs = self.theta ** (torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        y = self.yarn
        if y is None:
            return 1.0 / pos_freqs

        def dim_of(rotations: float) -> float:
            turns = y.original_max_position / (rotations * 2 * math.pi)
            return self.dim * math.log(turns) / (2 * math.log(self.theta))

        low, high = dim_of(y.beta_fast), dim_of(y.beta_slow)
        if y.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        if low == high:
            high += 0.001  # keeps the ramp finite
        ramp = ((torch.arange(self.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        return (1.0 / (y.factor * pos_freqs)) * (1 - keep) + (1.0 / pos_freqs) * keep


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """MLA (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are projected from one latent per token."""

    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    v_dim: int
    rope: Rope
    bias: bool  # of the projections from and to the hidden state, except q_proj
    norm_eps: float  # of the two latent norms

    @property
    def cache_width(self) -> int:
        """Values per token in a layer's cache: normed latent and rotated shared key."""
        return self.kv_lora + self.rope.dim

    @property
    def expanded_width(self) -> int:
        """Values per token where expanded keys and values are cached: keys of all heads, then values."""
        return self.heads * (self.nope + self.rope.dim + self.v_dim)

    @property
    def out_dim(self) -> int:
        return self.heads * self.v_dim

    @property
    def softmax_scale(self) -> float:
        """As in transformers: 1/sqrt(head) times the squared yarn magnitude of `mscale_all_dim`."""
        scale, yarn = float((self.nope + self.rope.dim) ** -0.5), self.rope.yarn
        if yarn and yarn.mscale_all_dim:
            scale *= _magnitude(yarn.factor, yarn.mscale_all_dim) ** 2
        return scale


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedAttention:
    """Grouped-query attention (arXiv 2305.13245): `heads / kv_heads` query heads share a key/value head."""

    heads: int
    kv_heads: int
    head: int  # channels per head
    rope: Rope
    qk_norm: bool  # RMSNorm of each query and key head
    qkv_bias: bool
    out_bias: bool
    norm_eps: float

    @property
    def cache_width(self) -> int:
        """Values per token in a layer's cache: rotated keys, then values."""
        return 2 * self.kv_heads * self.head

    @property
    def out_dim(self) -> int:
        return self.heads * self.head

    @property
    def softmax_scale(self) -> float:
        return float(self.head**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSpec:
    """How a router chooses experts and weights them."""

    top_k: int
    score: Literal["sigmoid", "softmax"]
    groups: int = 1
    group_topk: int = 1  # groups that experts are chosen from
    scale: float = 1.0  # factor on the gate weights
    renormalize: bool = True  # divide the gate weights of a token by their sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Moe:
    """Routed experts and an optional shared expert."""

    experts: int
    router: RouterSpec
    ffn: int  # of one expert
    shared_ffn: int  # of the shared expert; 0: there is none
    selection_bias: bool  # whether a bias is added to the scores for the choice of experts


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    vocab: int
    hidden: int
    layers: int
    attention: LatentAttention | GroupedAttention
    dense_ffn: int
    moe: Moe | None
    moe_layers: tuple[int, ...]  # numbers from 0 of the layers with routed experts
    norm_eps: float
    tied: bool
    mtp_layers: int  # multi-token-prediction layers after the last layer of the checkpoint; they are not served
    eos_ids: tuple[int, ...]

    @property
    def routed(self) -> int:
        """Experts per token in a MoE layer; 0 for a dense model."""
        return self.moe.router.top_k if self.moe is not None and self.moe_layers else 0
