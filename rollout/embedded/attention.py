"""The two kinds of attention over a paged cache. A layer's cache is [slots, width]; each kind says what is in it.

Letters: T packed tokens of a forward pass, R rows of a chunk, B sequences, Q query rows a sequence, L keys, H heads,
Hk key/value heads, C latent rank, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.embedded.architecture import GroupedAttention, LatentAttention
from rollout.embedded.batch import Chunk, ForwardBatch
from rollout.embedded.operations import Operations
from rollout.embedded.prepared import GroupedWeights, LatentWeights
from rollout.embedded.projections import Linear

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
    """x [T, D] -> [T, D]. Writes what each token leaves into the layer's cache."""
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
    qkv = _biased(w.qkv(x, ops), w.qkv_bias)
    q, k, v = torch.split(qkv.view(len(x), -1, a.head), [a.heads, a.kv_heads, a.kv_heads], 1)
    if w.q_norm is not None and w.k_norm is not None:
        q, k = ops.rmsnorm(q, w.q_norm, a.norm_eps), ops.rmsnorm(k, w.k_norm, a.norm_eps)
    qk, turning = torch.cat([q, k], 1), a.rope.dim
    turned = ops.rope(qk[..., :turning], *angles, deinterleave=a.rope.pairs)
    qk = turned if turning == a.head else torch.cat([turned, qk[..., turning:]], -1)
    cache.index_copy_(0, batch.slots, torch.cat([qk[:, a.heads :], v], 1).flatten(1))
    out = torch.empty(len(x), a.out_dim, dtype=x.dtype)
    for chunk in batch.chunks:
        b, length = chunk.key_slots.shape
        past = cache.index_select(0, chunk.key_slots.reshape(-1)).view(b, length, 2 * a.kv_heads, a.head)
        keys, values = past[:, :, : a.kv_heads], past[:, :, a.kv_heads :]
        heads = ops.attention(chunk.padded(qk[chunk.rows, : a.heads]), keys, values, a.softmax_scale, chunk.q_start)
        out[chunk.rows] = chunk.unpadded(heads).flatten(1)
    return _biased(w.out(out, ops, ops.parts), w.out_bias)


def _latent(
    a: LatentAttention, w: LatentWeights, x: Tensor, angles: Angles, batch: ForwardBatch, cache: Tensor, ops: Operations
) -> Tensor:
    width, rotated = a.cache_width, a.rope.dim
    down = _biased(w.down(x, ops), w.down_bias)
    first, latent, key = torch.split(down, [w.down.shape[0] - width, a.kv_lora, rotated], -1)
    if w.q_up is not None and w.q_norm is not None:
        first = w.q_up(ops.rmsnorm(first, w.q_norm, a.norm_eps), ops)
    q = first.view(len(x), a.heads, a.nope + rotated)
    turned = ops.rope(torch.cat([q[..., a.nope :], key[:, None]], 1), *angles, deinterleave=a.rope.pairs)
    latent = ops.rmsnorm(latent, w.kv_norm, a.norm_eps)
    out = torch.empty(len(x), a.out_dim, dtype=x.dtype)
    if ops.absorb:
        cache.index_copy_(0, batch.slots, torch.cat([latent, turned[:, -1]], -1))
        kv_up = w.kv_up.opened()
        for chunk in batch.chunks:
            q_nope, q_rope = q[chunk.rows, :, : a.nope], turned[chunk.rows, :-1]
            out[chunk.rows] = _latent_chunk(a, kv_up, q_nope, q_rope, chunk, cache, ops).flatten(1)
    else:  # keys and values are made once, not whenever a token attends to them
        k, v = _expanded(a, w.kv_up, latent, turned[:, -1], ops)
        cache.index_copy_(0, batch.slots, torch.cat([k.flatten(1), v.flatten(1)], -1))
        q = torch.cat([q[..., : a.nope], turned[:, :-1]], -1)
        for chunk in batch.chunks:
            out[chunk.rows] = _expanded_chunk(a, q[chunk.rows], chunk, cache, ops).flatten(1)
    return _biased(w.out(out, ops, ops.parts), w.out_bias)


def _latent_chunk(
    a: LatentAttention, kv_up: Linear, q_nope: Tensor, q_rope: Tensor, chunk: Chunk, cache: Tensor, ops: Operations
) -> Tensor:
    """q_nope [R, H, nope], q_rope [R, H, rotated] of a chunk's R rows -> [R, H, v].

    Queries are absorbed where that is cheaper and the same function: not where the latents are to be rounded first.
    """
    b, length = chunk.key_slots.shape
    past = cache.index_select(0, chunk.key_slots.reshape(-1)).view(b, length, a.cache_width)
    absorb = ops.absorb and cache.dtype == torch.float32 and chunk.queries < _absorb_below(a)
    absorb = absorb and not kv_up.rounds_inputs
    by_head = kv_up.value().view(a.heads, a.nope + a.v_dim, a.kv_lora)
    if absorb:
        q_nope = torch.bmm(q_nope.transpose(0, 1), by_head[:, : a.nope]).transpose(0, 1)
        k, v = past[:, :, None], past[:, :, None, : a.kv_lora]
    else:
        flat = past.flatten(0, 1)
        made = _expanded(a, kv_up, flat[:, : a.kv_lora], flat[:, a.kv_lora :], ops)
        k, v = (t.unflatten(0, (b, length)) for t in made)
    q = chunk.padded(torch.cat([q_nope, q_rope], -1))
    out = chunk.unpadded(ops.attention(q, k, v, a.softmax_scale, chunk.q_start))  # [R, H, C or v]
    return torch.bmm(out.transpose(0, 1), by_head[:, a.nope :].transpose(1, 2)).transpose(0, 1) if absorb else out


def _expanded_chunk(a: LatentAttention, q: Tensor, chunk: Chunk, cache: Tensor, ops: Operations) -> Tensor:
    """q [R, H, nope + rotated] of a chunk's R rows -> [R, H, v], over a cache of keys and values."""
    past = cache.index_select(0, chunk.key_slots.reshape(-1)).view(*chunk.key_slots.shape, -1)
    keys = a.heads * (a.nope + a.rope.dim)
    k, v = (t.unflatten(-1, (a.heads, -1)) for t in (past[..., :keys], past[..., keys:]))
    return chunk.unpadded(ops.attention(chunk.padded(q), k, v, a.softmax_scale, chunk.q_start))


def _expanded(a: LatentAttention, kv_up: Linear, latent: Tensor, key: Tensor, ops: Operations) -> tuple[Tensor, Tensor]:
    """latent [T, C], key [T, rotated] -> keys [T, H, nope + rotated] and values [T, H, v]."""
    k_nope, v = torch.split(kv_up(latent, ops).view(len(latent), a.heads, -1), [a.nope, a.v_dim], -1)
    return torch.cat([k_nope, key[:, None].expand(-1, a.heads, -1)], -1), v


def _absorb_below(a: LatentAttention) -> float:
    """Query rows a key from which on expanding the keys is cheaper than absorbing the queries.

    Products a query row and key: absorbed 2C + rope, expanded nope + rope + v and once C (nope + v) a key.
    """
    saved = 2 * a.kv_lora - a.nope - a.v_dim
    return a.kv_lora * (a.nope + a.v_dim) / saved if saved > 0 else float("inf")


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    """Added to the rounded product, as megatron's parallel linears do."""
    return y if bias is None else y + bias
