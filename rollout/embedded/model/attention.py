"""Latent and grouped-query attention over a paged cache. A layer's cache is [slots, width].

Letters: T packed tokens of a forward pass, R rows of a chunk, B sequences, Q query rows per sequence, L keys, H heads,
Hk key/value heads, C latent rank, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.embedded.families.architecture import GroupedAttention, LatentAttention
from rollout.embedded.kernels.cache_layout import CacheLayout
from rollout.embedded.kernels.chosen import by_triton
from rollout.embedded.model.batch import Chunk, ForwardBatch
from rollout.embedded.model.operations import Operations
from rollout.embedded.model.prepared import GroupedWeights, LatentWeights
from rollout.embedded.model.projections import Linear

Angles = tuple[Tensor, Tensor]  # cos and sin, [T, rotated / 2] each


def attend(
    a: LatentAttention | GroupedAttention,
    w: LatentWeights | GroupedWeights,
    x: Tensor,
    angles: Angles,
    batch: ForwardBatch,
    cache: Tensor,
    ops: Operations,
) -> Tensor:
    """x [T, D] -> outputs of the heads [T, H * channels of a value], before the projection to the hidden state. Writes
    each token's state into the layer's cache. `a` and `w` are those of the heads of this rank."""
    if isinstance(a, LatentAttention):
        assert isinstance(w, LatentWeights)
        return _latent(a, w, x, angles, batch, cache, ops)
    assert isinstance(w, GroupedWeights)
    return _grouped(a, w, x, angles, batch, cache, ops)


def _grouped(
    a: GroupedAttention,
    w: GroupedWeights,
    x: Tensor,
    angles: Angles,
    batch: ForwardBatch,
    cache: Tensor,
    ops: Operations,
) -> Tensor:
    qkv = biased(w.qkv(x, ops), w.qkv_bias)
    q, k, v = torch.split(qkv.view(len(x), -1, a.head), [a.heads, a.kv_heads, a.kv_heads], 1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = ops.rmsnorm(q, w.q_norm, a.norm_eps), ops.rmsnorm(k, w.k_norm, a.norm_eps)
    qk, dim = torch.cat([q, k], 1), a.rope.dim
    rotated = ops.rope(qk[..., :dim], *angles, deinterleave=a.rope.pairs)
    qk = rotated if dim == a.head else torch.cat([rotated, qk[..., dim:]], -1)
    cache.index_copy_(0, batch.slots, torch.cat([qk[:, a.heads :], v], 1).flatten(1))
    out = torch.empty(len(x), a.out_dim, dtype=x.dtype, device=x.device)
    for chunk in batch.chunks:
        if _in_place(chunk, cache):
            layout = CacheLayout.of_heads(a.kv_heads, a.head)
            out[chunk.rows] = _attended(qk[chunk.rows, : a.heads], a.softmax_scale, chunk, cache, layout).flatten(1)
            continue
        b, length = chunk.key_slots.shape
        past = cache.index_select(0, chunk.key_slots.reshape(-1)).view(b, length, 2 * a.kv_heads, a.head)
        keys, values = past[:, :, : a.kv_heads], past[:, :, a.kv_heads :]
        heads = ops.attention(chunk.padded(qk[chunk.rows, : a.heads]), keys, values, a.softmax_scale, chunk.q_start)
        out[chunk.rows] = chunk.unpadded(heads).flatten(1)
    return out


def _latent(
    a: LatentAttention, w: LatentWeights, x: Tensor, angles: Angles, batch: ForwardBatch, cache: Tensor, ops: Operations
) -> Tensor:
    width, dim = a.cache_width, a.rope.dim
    down = biased(w.down(x, ops), w.down_bias)
    first, latent, key = torch.split(down, [w.down.shape[0] - width, a.kv_lora, dim], -1)
    if w.q_up is not None and w.q_norm is not None:
        first = w.q_up(ops.rmsnorm(first, w.q_norm, a.norm_eps), ops)
    q = first.view(len(x), a.heads, a.nope + dim)
    rotated = ops.rope(torch.cat([q[..., a.nope :], key[:, None]], 1), *angles, deinterleave=a.rope.pairs)
    latent = ops.rmsnorm(latent, w.kv_norm, a.norm_eps)
    out = torch.empty(len(x), a.out_dim, dtype=x.dtype, device=x.device)
    if ops.absorb:
        cache.index_copy_(0, batch.slots, torch.cat([latent, rotated[:, -1]], -1))
        kv_up = w.kv_up.opened()
        for chunk in batch.chunks:
            q_nope, q_rope = q[chunk.rows, :, : a.nope], rotated[chunk.rows, :-1]
            out[chunk.rows] = _latent_chunk(a, kv_up, q_nope, q_rope, chunk, cache, ops).flatten(1)
    else:  # keys and values are expanded once and cached
        k, v = _expanded(a, w.kv_up, latent, rotated[:, -1], ops)
        cache.index_copy_(0, batch.slots, torch.cat([k.flatten(1), v.flatten(1)], -1))
        q = torch.cat([q[..., : a.nope], rotated[:, :-1]], -1)
        for chunk in batch.chunks:
            out[chunk.rows] = _expanded_chunk(a, q[chunk.rows], chunk, cache, ops).flatten(1)
    return out


def _latent_chunk(
    a: LatentAttention, kv_up: Linear, q_nope: Tensor, q_rope: Tensor, chunk: Chunk, cache: Tensor, ops: Operations
) -> Tensor:
    """q_nope [R, H, nope], q_rope [R, H, rotated] of a chunk's R rows -> [R, H, v].

    Queries are absorbed where that is cheaper, but not where it would compute another function, because inputs are
    rounded, nor in bfloat16 on CPU, whose products round the absorbed query once more.
    """
    b, length = chunk.key_slots.shape
    absorb = ops.absorb and (cache.is_cuda or cache.dtype == torch.float32) and chunk.queries < _absorb_below(a)
    absorb = absorb and not kv_up.rounds_inputs
    by_head = kv_up.value().view(a.heads, a.nope + a.v_dim, a.kv_lora)
    if absorb:
        q_nope = torch.bmm(q_nope.transpose(0, 1), by_head[:, : a.nope]).transpose(0, 1)
    if absorb and _in_place(chunk, cache):
        layout = CacheLayout.of_latent(a.kv_lora, a.rope.dim)
        out = _attended(torch.cat([q_nope, q_rope], -1), a.softmax_scale, chunk, cache, layout)  # [R, H, C]
        return torch.bmm(out.transpose(0, 1), by_head[:, a.nope :].transpose(1, 2)).transpose(0, 1)
    past = cache.index_select(0, chunk.key_slots.reshape(-1)).view(b, length, a.cache_width)
    if absorb:
        k, v = past[:, :, None], past[:, :, None, : a.kv_lora]
    else:
        flat = past.flatten(0, 1)
        expanded = _expanded(a, kv_up, flat[:, : a.kv_lora], flat[:, a.kv_lora :], ops)
        k, v = (t.view(b, length, a.heads, -1) for t in expanded)
    q = chunk.padded(torch.cat([q_nope, q_rope], -1))
    out = chunk.unpadded(ops.attention(q, k, v, a.softmax_scale, chunk.q_start))  # [R, H, C or v]
    return torch.bmm(out.transpose(0, 1), by_head[:, a.nope :].transpose(1, 2)).transpose(0, 1) if absorb else out


def _in_place(chunk: Chunk, cache: Tensor) -> bool:
    """Whether a Triton kernel attends for a chunk of decoded tokens, without copies of keys and values."""
    return chunk.pad is None and by_triton(cache)


def _attended(q: Tensor, scale: float, chunk: Chunk, cache: Tensor, layout: CacheLayout) -> Tensor:
    """q [R, H, d] -> [R, H, values of a head]."""
    from rollout.embedded.kernels.decode_attention import attend_in_place

    return attend_in_place(q, cache, chunk.key_slots, chunk.q_start, scale, layout)


def _expanded_chunk(a: LatentAttention, q: Tensor, chunk: Chunk, cache: Tensor, ops: Operations) -> Tensor:
    """q [R, H, nope + rotated] of a chunk's R rows -> [R, H, v], over a cache of keys and values."""
    b, length = chunk.key_slots.shape
    past = cache.index_select(0, chunk.key_slots.reshape(-1)).view(b, length, -1)
    keys = a.heads * (a.nope + a.rope.dim)
    k, v = (t.view(b, length, a.heads, -1) for t in (past[..., :keys], past[..., keys:]))
    return chunk.unpadded(ops.attention(chunk.padded(q), k, v, a.softmax_scale, chunk.q_start))


def _expanded(a: LatentAttention, kv_up: Linear, latent: Tensor, key: Tensor, ops: Operations) -> tuple[Tensor, Tensor]:
    """latent [T, C], key [T, rotated] -> keys [T, H, nope + rotated] and values [T, H, v]."""
    k_nope, v = torch.split(kv_up(latent, ops).view(len(latent), a.heads, -1), [a.nope, a.v_dim], -1)
    return torch.cat([k_nope, key[:, None].expand(-1, a.heads, -1)], -1), v


def _absorb_below(a: LatentAttention) -> float:
    """Number of query rows per key from which expanding the keys is cheaper than absorbing the queries.

    Multiplications per query row and key: absorbed 2C + rope; expanded nope + rope + v, and once C (nope + v) per key.
    """
    saved = 2 * a.kv_lora - a.nope - a.v_dim
    return a.kv_lora * (a.nope + a.v_dim) / saved if saved > 0 else float("inf")


def biased(y: Tensor, bias: Tensor | None) -> Tensor:
    """The bias is added to the rounded product, as in megatron's parallel linears."""
    return y if bias is None else y + bias
