"""DeepSeek-V3 in plain torch: latent attention over a paged cache, grouped sigmoid router, shared experts.

All arithmetic goes through an `Operations` set; what is left here is which rows meet which weights.

Letters: T packed tokens of a forward pass, B sequences, Q query rows a sequence, L keys, H heads, C latent rank,
D hidden, E experts, K experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollout.embedded.architecture import Architecture
from rollout.embedded.kv_cache import KVCache
from rollout.embedded.operations import Operations
from rollout.embedded.prepared import AttentionWeights, LayerWeights, MlpWeights, ModelWeights, MoeWeights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Sequences that attend together; their rows are `rows` of the packed tokens."""

    rows: slice
    key_slots: Tensor  # [B, L] int64: cache slot of each position; past a sequence's end any slot
    q_start: Tensor  # [B] int64: position of the first query row
    pad: Tensor | None  # [B, Q] int64 into the chunk's rows; None: Q = 1
    unpad: Tensor | None  # [rows] int64 into [B * Q]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ForwardBatch:
    """Any mix of prompt chunks and single decoded tokens."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    slots: Tensor  # [T] int64: where each token's latent and routing are written
    chunks: Sequence[Chunk]  # tile [0, T)


class Model:
    """`weights` may be replaced between two forward passes."""

    def __init__(self, arch: Architecture, weights: ModelWeights, ops: Operations, dtype: torch.dtype) -> None:
        self.arch = arch
        self.weights = weights
        self.ops = ops
        self.dtype = dtype
        self._inv_freq = arch.inv_freq()
        a = arch
        # Products a query row and key: absorbed 2C + rope, expanded nope + rope + v and once C (nope + v) a key.
        saved = 2 * a.kv_lora - a.nope - a.v_dim
        self._absorb_below = a.kv_lora * (a.nope + a.v_dim) / saved if saved > 0 else float("inf")

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """[T, D] before the last norm. Writes each token's latents and expert ids into the cache."""
        a, w = self.arch, self.weights
        x = w.embed[batch.tokens]
        angles = self.ops.rope_cos_sin(batch.positions, self._inv_freq, a.rope_mscale, self.dtype)
        routing = torch.zeros(len(x), a.layers, a.top_k, dtype=torch.int32)
        for i, layer in enumerate(w.layers):
            h = self.ops.rmsnorm(x, layer.input_norm, a.norm_eps)
            x = x + self._attention(layer.attention, h, angles, batch, cache.latents[i])
            x = x + self._feed_forward(layer, self.ops.rmsnorm(x, layer.post_norm, a.norm_eps), routing[:, i])
        cache.routing.index_copy_(0, batch.slots, routing)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """[T, D] of `forward` -> [T, V]."""
        return self.ops.linear(self.ops.rmsnorm(x, self.weights.norm, self.arch.norm_eps), self.weights.head)

    def _attention(
        self, w: AttentionWeights, x: Tensor, angles: tuple[Tensor, Tensor], batch: ForwardBatch, latents: Tensor
    ) -> Tensor:
        a, ops = self.arch, self.ops
        first, latent, key = torch.split(ops.linear(x, w.down), [len(w.down) - a.latent, a.kv_lora, a.rope], -1)
        if w.q_up is not None and w.q_norm is not None:
            first = ops.linear(ops.rmsnorm(first, w.q_norm, a.latent_norm_eps), w.q_up)
        q = first.view(len(x), a.heads, a.nope + a.rope)
        turned = ops.rope(torch.cat([q[..., a.nope :], key[:, None]], 1), *angles, deinterleave=True)
        latent = ops.rmsnorm(latent, w.kv_norm, a.latent_norm_eps)
        latents.index_copy_(0, batch.slots, torch.cat([latent, turned[:, -1]], -1))
        out = torch.empty(len(x), a.heads * a.v_dim, dtype=x.dtype)
        for chunk in batch.chunks:
            q_nope, q_rope = q[chunk.rows, :, : a.nope], turned[chunk.rows, :-1]
            out[chunk.rows] = self._attend(w, q_nope, q_rope, chunk, latents).flatten(1)
        return ops.linear(out, w.out)

    def _attend(self, w: AttentionWeights, q_nope: Tensor, q_rope: Tensor, chunk: Chunk, latents: Tensor) -> Tensor:
        """q_nope [R, H, nope], q_rope [R, H, rope] of a chunk's R rows -> [R, H, v]."""
        a = self.arch
        b, length = chunk.key_slots.shape
        n = 1 if chunk.pad is None else chunk.pad.shape[1]
        past = latents.index_select(0, chunk.key_slots.reshape(-1)).view(b, length, a.latent)
        absorb = self.ops.absorb and self.dtype == torch.float32 and n < self._absorb_below
        if absorb:
            q_nope = torch.bmm(q_nope.transpose(0, 1), w.key_up).transpose(0, 1)
            k, v = past[:, :, None], past[:, :, None, : a.kv_lora]
        else:
            kv = self.ops.linear(past[..., : a.kv_lora].reshape(b * length, -1), w.kv_up)
            k_nope, v = torch.split(kv.view(b, length, a.heads, -1), [a.nope, a.v_dim], -1)
            k = torch.cat([k_nope, past[:, :, None, a.kv_lora :].expand(-1, -1, a.heads, -1)], -1)
        q = torch.cat([q_nope, q_rope], -1)
        q = q[:, None] if chunk.pad is None else q[chunk.pad]
        out = self.ops.attention(q, k, v, a.softmax_scale, chunk.q_start).flatten(0, 1)  # [B * Q, H, C or v]
        if chunk.unpad is not None:
            out = out[chunk.unpad]
        return torch.bmm(out.transpose(0, 1), w.value_up).transpose(0, 1) if absorb else out

    def _feed_forward(self, layer: LayerWeights, x: Tensor, routing: Tensor) -> Tensor:
        if isinstance(layer.mlp, MlpWeights):
            return self._mlp(layer.mlp, x)
        return self._moe(layer.mlp, x, routing)

    def _mlp(self, w: MlpWeights, x: Tensor) -> Tensor:
        return self.ops.linear(self.ops.swiglu(self.ops.linear(x, w.gate_up)), w.down)

    def _moe(self, w: MoeWeights, x: Tensor, routing: Tensor) -> Tensor:
        """`routing` int32 [T, K] receives the expert ids. The gate weight enters before the last projection."""
        a, ops = self.arch, self.ops
        ids, gates = ops.route(
            x,
            w.router,
            a.top_k,
            bias=w.bias,
            groups=a.groups,
            group_topk=a.group_topk,
            scale=a.routed_scale,
            renormalize=a.renormalize,
        )
        routing.copy_(ids)
        flat = ids.numpy().reshape(-1).astype(np.int16)  # numpy sorts 16-bit keys by radix
        counts = np.bincount(flat, minlength=a.experts).tolist()
        order = torch.from_numpy(np.argsort(flat, kind="stable"))
        token = order // a.top_k
        h = ops.grouped_linear(x.index_select(0, token), w.gate_up, counts)
        h = ops.swiglu(h, gates.reshape(-1, 1).index_select(0, order))
        y = ops.combine(ops.grouped_linear(h, w.down, counts), token, len(x))
        return y if w.shared is None else y + self._mlp(w.shared, x)
